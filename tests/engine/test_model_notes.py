"""Notes about a model: the verdict of `models check`, and a repetition penalty that generation_config.json asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint

from cacheblend_cli import user_cache
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.model_notes import BlendVerdict, keep_verdict, known_verdict, model_notes
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

GREEDY = SamplingParams()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / "cache")
    write_checkpoint(tmp_path / "m", "qwen2")
    return Engine.load(EngineConfig(model=str(tmp_path / "m"), dtype="float32")).model


@pytest.mark.parametrize(
    ("verdict", "blend", "told"),
    [
        (None, BlendParams(), False),
        (0.15, BlendParams(), False),
        (0.15, BlendParams(ratio=0.05), False),  # not measured
        (0.3, BlendParams(), True),
        (0.3, BlendParams(ratio=0.3), False),
        (0.3, BlendParams(checks=((1, 0.5), (2, 0.2))), True),
        (0.3, BlendParams("full"), False),
        (0.3, BlendParams("reuse"), False),
        (0.3, BlendParams(selector="hkvd"), False),  # not what was measured
        ("full", BlendParams(ratio=0.9), True),
    ],
)
def test_a_ratio_below_the_verdict_is_noted(
    model: LoadedModel, verdict: float | str | None, blend: BlendParams, told: bool
) -> None:
    if verdict is not None:
        keep_verdict(model, BlendVerdict(None if verdict == "full" else float(verdict)))
    assert len(model_notes(model, blend, GREEDY, 2)) == told
    assert model_notes(model, blend, GREEDY, 1) == [], "one chunk is exact"


def test_a_verdict_is_of_a_model_in_every_dtype_and_of_no_other(model: LoadedModel, tmp_path: Path) -> None:
    keep_verdict(model, BlendVerdict(0.3))
    other = Engine.load(EngineConfig(model=str(tmp_path / "m"), dtype="bfloat16")).model
    assert other.fingerprint != model.fingerprint
    assert known_verdict(other) == BlendVerdict(0.3)
    write_checkpoint(tmp_path / "n", "qwen2", seed=1)
    assert known_verdict(Engine.load(EngineConfig(model=str(tmp_path / "n"), dtype="float32")).model) is None
    [kept] = (tmp_path / "cache" / "blending").iterdir()
    for text in ("", "{", "[]", '{"other": 1}'):
        kept.write_text(text)
        assert known_verdict(model) is None


@pytest.mark.parametrize(
    ("config", "sampling", "told"),
    [
        ({}, GREEDY, False),
        ({"repetition_penalty": 1.1}, GREEDY, True),
        ({"repetition_penalty": 1.0}, GREEDY, False),
        ({"repetition_penalty": "much"}, GREEDY, False),
        ({"repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1), False),
        ({"repetition_penalty": 1.1}, SamplingParams(temperature=0.7), False),
        ({"repetition_penalty": 1.1, "do_sample": True, "temperature": 0.7}, GREEDY, True),
    ],
)
def test_a_repetition_penalty_of_the_model_is_noted_when_greedy(
    model: LoadedModel, config: dict[str, Any], sampling: SamplingParams, told: bool
) -> None:
    assert len(model_notes(replace(model, generation_config=config), BlendParams(), sampling, 0)) == told


def test_an_answer_carries_the_note_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    (tmp_path / "m" / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    engine = Engine.load(EngineConfig(model=str(tmp_path / "m")))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(2):
        answer = engine.run_alone(None, AskRequest("who?", [], BlendParams(), sampling))
        assert sum("repetition_penalty" in note for note in answer.notes) == 1
