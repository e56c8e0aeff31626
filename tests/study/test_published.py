"""study/published.py: each method keeps its budget, is a full prefill at ratio 1, and lets no row see later text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.evaluate import EvaluateOptions, evaluate
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.types import AskRequest

TEXTS = [" ".join(WORDS[p % 7 : p % 7 + 9]) + f" {p}. " for p in range(5)]
METHODS = ("CacheBlend", "EPIC", "CacheClip", "FusionRAG", "ProphetKV", "PSR", "QCFuse", "AgentKVShift", "RelaxKV")
CHECKED = ("CacheBlend", "PSR", "AgentKVShift")
LAYERS = 4


def sample(*texts: str) -> Sample:
    return Sample("where does Mara work?", (), tuple(Context(t) for t in texts))


SAMPLE = sample(*TEXTS[:4])


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    with study_modules(register=True) as load:
        yield load("published")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("published") / "model"
    write_checkpoint(path, "llama-gqa", num_hidden_layers=LAYERS)
    return Engine.load(EngineConfig(model=str(path), device="cpu", dtype="float32", block_size=16))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path_factory.mktemp("published") / "store", mode="write") as store:
        yield store


def test_at_ratio_one_each_is_a_full_prefill(published: ModuleType, engine: Engine, store: ChunkStore) -> None:
    settings = published.published_settings([0.3, 1.0])
    results = evaluate(engine, store, [SAMPLE], settings, EvaluateOptions(6))
    assert [s.label for s in settings] == [f"{m} {r}" for m in METHODS for r in ("0.3", "1")]
    for method in METHODS:
        [all_of_it], [some] = results.by_label[f"{method} 1"], results.by_label[f"{method} 0.3"]
        assert max(all_of_it.kl) < 1e-8 < max(some.kl)
        assert max(all_of_it.k_error + all_of_it.v_error) < 1e-4


def run(published: ModuleType, engine: Engine, store: ChunkStore, method: str, what: Sample) -> Prefilled:
    [setting] = [s for s in published.published_settings([0.3]) if s.label.startswith(method)]
    chunks = SampleChunks(engine, store, [sample(*TEXTS)])
    chunks.store([what], [setting.context])
    keys = chunks.keys(what, setting.context)
    request = resolve(engine.runtime, store, AskRequest(what.question, keys, setting.blend))
    return (setting.prefill or Engine.hold_prefill)(engine, request)


@pytest.mark.parametrize("method", METHODS)
def test_the_budget_is_kept_and_no_row_sees_later_text(
    published: ModuleType, engine: Engine, store: ChunkStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Two prompts that differ in their last chunk only: nothing differs before the first token chosen otherwise."""
    monkeypatch.setattr(published, "_attend_to", seeing_nothing_later(published._attend_to))
    found = []
    for texts in (TEXTS[:4], (*TEXTS[:3], TEXTS[4])):
        done = run(published, engine, store, method, sample(*texts))
        fresh = [report.fresh for report in done.result.layers]
        share = 0.3 + (2 * 0.7 / LAYERS if method in CHECKED else 0)  # layer 0 and the check layer are whole
        assert 0 < sum(fresh) <= share * LAYERS * done.plan.inexact_tokens + LAYERS
        assert sorted(fresh, reverse=True) == fresh
        end = done.plan.chunks[-1].start
        chosen = {p for p in done.result.chosen.tolist() if p < end}
        found.append((done.pool.read_k(LAYERS - 1, slice(0, end)).clone(), chosen))
    (one, first), (two, second) = found
    same = min(first ^ second, default=end)
    if method == "AgentKVShift":  # a chunk's tokens are moved by what its later ones say
        same = max(s.start for s in done.plan.chunks if s.start <= same)
    if method != "RelaxKV":  # what a row sees is chosen by the question, which sees all
        assert torch.allclose(one[:same], two[:same], atol=1e-5)
    assert published.forward.attend is published._attend


def seeing_nothing_later(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def checked(prompt: Any, layer: Any, q: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        furthest = torch.where(seen, torch.arange(seen.shape[1]), -1).amax(1)
        assert (furthest.diff() > 0).all()  # each row's furthest key is itself, and rows are sorted
        assert furthest[-1] == seen.shape[1] - 1
        return attend(prompt, layer, q, seen)

    return checked


def test_relaxkv_spends_the_ratio_on_the_whole(published: ModuleType, engine: Engine, store: ChunkStore) -> None:
    done = run(published, engine, store, "RelaxKV", SAMPLE)
    fresh = [report.fresh for report in done.result.layers]
    assert fresh[0] > fresh[-1]
    assert abs(sum(fresh) - 0.3 * LAYERS * done.plan.inexact_tokens) <= LAYERS
