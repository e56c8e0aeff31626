"""Trained wrappers: plain torch and the engine agree on what they do, and training brings stored KV nearer to a full
prefill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.samples import Context, Sample

TEXTS = [" ".join(WORDS[p % 7 : p % 7 + 9]) + f" {p}. " for p in range(3)]
SAMPLE = Sample("where does Mara work?", (), tuple(Context(text) for text in TEXTS))


@pytest.fixture(scope="module")
def study() -> Iterator[dict[str, ModuleType]]:
    """Its modules by name."""
    with study_modules() as load:
        yield {name: load(name) for name in ("torch_llama", "wrapped_prompts", "wrappers", "wrapped")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrappers") / "model"
    write_checkpoint(path, "llama-gqa")
    return path


@pytest.fixture(scope="module")
def prompts(study: dict[str, ModuleType], checkpoint: Path) -> Any:
    with torch.no_grad():
        return study["wrapped_prompts"].Prompts(study["torch_llama"].Frozen(checkpoint, torch.float32))


def lesson(study: dict[str, ModuleType], prompts: Any, sample: Sample, length: int) -> Any:
    chunks = [prompts.model.tokenizer.encode_text(c.text) for c in sample.contexts]
    return study["wrappers"].Lesson.of(prompts, chunks, [sample.question, "who leads?"], length)


def distance(prompts: Any, of: Any, wrappers: Any) -> float:
    with torch.no_grad():
        return float(of.kl(prompts, prompts.stored(of.chunks, wrappers)).mean())


@pytest.mark.parametrize("name", ["soft 8+8", "deep 8+8"])
def test_the_engine_measures_what_was_trained(
    study: dict[str, ModuleType], prompts: Any, checkpoint: Path, name: str
) -> None:
    engine = Engine.load(EngineConfig(model=str(checkpoint), device="cpu", dtype="float32", block_size=16))
    with torch.no_grad():
        wrappers = study["wrappers"].variants(prompts)[name]
    [found] = study["wrapped"].measure(engine, [SAMPLE], {"w": wrappers})
    one = lesson(study, prompts, SAMPLE, study["wrapped"].TOKENS)
    alone = type(one)(one.chunks, one.suffixes[:1], one.answers[:1], one.target[:1], one.counts[:1])
    assert found["reuse"] == pytest.approx(distance(prompts, alone, None), rel=1e-3)
    assert found["w: reuse"] == pytest.approx(distance(prompts, alone, wrappers), rel=1e-3)
    assert min(found.values()) > 1e-6
    assert len(set(found.values())) == len(found) == 10


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("llama-gqa", {"attention_bias": True}, "qkv_bias"),
        ("llama-gqa", {"hidden_act": "gelu"}, "activation"),
        ("mistral", {"sliding_window": 24}, "sliding_windows"),
    ],
)
def test_a_model_that_is_computed_otherwise_is_refused(
    study: dict[str, ModuleType], tmp_path: Path, family: str, changes: dict[str, Any], field: str
) -> None:
    write_checkpoint(tmp_path / "model", family, **changes)
    with pytest.raises(ValueError, match=field):
        study["torch_llama"].Frozen(tmp_path / "model", torch.float32)


def test_figures_are_kept_by_setting_and_wrappers(study: dict[str, ModuleType], tmp_path: Path) -> None:
    of, path = study["wrapped"].Figures.of, tmp_path / "kl.json"
    row = {"default 0.15": 0.1, "a: reuse": 0.2, "b: reuse": 0.3}
    of(path, {"cut": None}, {"a": "1", "b": "2"}).put(0, row)
    assert of(path, {"cut": None}, {"a": "1"}).rows == [row]
    again = of(path, {"cut": None}, {"a": "1", "b": "3"})
    assert again.rows == [{"default 0.15": 0.1, "a: reuse": 0.2}]
    again.put(0, row)
    again.put(1, {"default 0.15": 0.4, "b: reuse": 0.1})
    assert of(path, {"cut": None}, {"b": "3"}).rows == again.rows
    page = "\n".join(study["wrapped"].report(again.rows))
    assert "b: reuse" in page
    assert "a: reuse" not in page
    with pytest.raises(ValueError, match=path.name):
        of(path, {"cut": 128}, {"a": "1", "b": "3"})


def test_no_held_out_passage_is_trained_on(study: dict[str, ModuleType]) -> None:
    texts = [("a", "b", "c"), ("a", "d"), ("e", "d", "f"), ("g", "h"), ("g", "h", "i")]
    samples = [Sample("?", (), tuple(Context(t) for t in of)) for of in texts]
    learned, tests = study["wrappers"].halves(samples)
    assert [[c.text for c in sample.contexts] for sample in learned] == [["b", "c"], ["e", "f"]]
    assert tests == samples[1::2]


def test_one_chunk_without_wrappers_is_a_full_prefill(study: dict[str, ModuleType], prompts: Any) -> None:
    of = lesson(study, prompts, Sample("where?", (), SAMPLE.contexts[:1]), 4)
    assert distance(prompts, of, None) < 1e-8
    assert distance(prompts, of, study["wrappers"].variants(prompts)["soft 8+8"]) > 1e-6


@pytest.mark.parametrize("name", ["soft 8+8", "soft 0+8", "deep 8+0"])
def test_training_lowers_the_distance(study: dict[str, ModuleType], prompts: Any, name: str, tmp_path: Path) -> None:
    of = lesson(study, prompts, SAMPLE, 8)
    begun = study["wrappers"].variants(prompts)[name]
    trained = study["wrappers"].Trained(begun, 1e-2, 1e-2)
    before = distance(prompts, of, begun)
    for _ in range(10):
        trained.learn(prompts, [of, of])
    assert distance(prompts, of, trained.average) < 0.9 * before
    trained.average.save(tmp_path / "wrappers.safetensors")
    again = study["wrapped_prompts"].Wrappers.load(tmp_path / "wrappers.safetensors")
    assert distance(prompts, of, again) == distance(prompts, of, trained.average)


@torch.no_grad()
def test_a_prompts_own_mean_change_leaves_none(study: dict[str, ModuleType], prompts: Any) -> None:
    chunks = [prompts.model.tokenizer.encode_text(c.text) for c in SAMPLE.contexts]
    begin, change = prompts.start + len(chunks[0]), prompts.change(chunks)
    whole, stored = prompts.whole(chunks), prompts.stored(chunks, None)
    moved = prompts.shifted(chunks, change)
    turns = prompts.model.turns(torch.arange(begin, whole[0][0].shape[1])[None])
    back = (turns[0], -turns[1])
    for layer in range(1, len(whole)):
        for part, undone in ((0, lambda k: study["torch_llama"].rotated(k, back)), (1, lambda v: v)):
            left, before = (undone((whole[layer][part] - kv[layer][part])[:, begin:]).mean(1) for kv in (moved, stored))
            assert left.abs().max() < 1e-5 < before.abs().max()
