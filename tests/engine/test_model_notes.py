"""Notes about a model: a repetition penalty that generation_config.json asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.request.model_sampling import model_notes
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

GREEDY = SamplingParams()


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    write_checkpoint(tmp_path / "m", "qwen2")
    return Engine.load(EngineConfig(model=str(tmp_path / "m"), dtype="float32")).model


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
    assert len(model_notes(replace(model, generation_config=config), sampling)) == told


def test_an_answer_carries_the_note_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    (tmp_path / "m" / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    engine = Engine.load(EngineConfig(model=str(tmp_path / "m")))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(2):
        answer = engine.run_alone(None, AskRequest("who?", [], BlendParams(), sampling))
        assert sum("repetition_penalty" in note for note in answer.notes) == 1
