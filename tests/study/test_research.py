"""study/research.py: selectors and a correction that only the study compares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from prefill_bench import Bench
from selector_checks import check_probe_ignores_pool, check_probe_leaves_nothing
from study_modules import study_modules

from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.forward import write_kv
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.types import BlendParams

EVERY = ("draft", "perturb", "random:2+draft", "first:1+perturb")


@pytest.fixture(scope="module")
def research() -> Iterator[ModuleType]:
    with study_modules(register=True) as load:
        yield load("research")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("name", EVERY)
def test_a_selector_keeps_its_ratio_and_all_of_it_is_full_prefill(
    research: ModuleType, bench: Bench, name: str
) -> None:
    full = bench.prefill(BlendParams(mode="full"))
    some, whole = (bench.prefill(BlendParams(selector=name, ratio=r, correction="mean-shift")) for r in (0.25, 1.0))
    assert len(some.result.chosen) == -(-some.plan.inexact_tokens // 4)
    assert len(whole.result.chosen) == some.plan.inexact_tokens
    assert (whole.result.logits - full.result.logits).abs().max() <= 1e-4
    assert torch.isfinite(some.result.logits).all()


@pytest.mark.parametrize("name", EVERY)
def test_a_probe_leaves_nothing_behind(
    research: ModuleType, bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = check_probe_leaves_nothing(bench, name, monkeypatch)
    short = bench.prefill(BlendParams(selector=name, ratio=0.2), headroom=1)
    assert len(short.result.chosen) == count, "a draft is as long as there is room for"


@pytest.mark.parametrize("name", ["draft", "perturb"])
def test_a_probe_ignores_what_was_in_the_pool(
    research: ModuleType, bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_probe_ignores_pool(bench, name, monkeypatch)


def test_a_draft_takes_the_tokens_before_a_peak_too(research: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = torch.zeros(12)
    peak[11] = 1.0
    monkeypatch.setattr(research, "BeforeLayers", _Anything)
    monkeypatch.setattr(research.DraftAttention, "attention", lambda *args: peak)
    scores = research.DraftAttention().scores(None, _Anything())
    assert scores.topk(3).indices.sort().values.tolist() == [9, 10, 11]


class _Anything:
    prompt, probe_layers = None, frozenset[int]()


def test_the_mean_shift_is_the_mean_change_and_shrinks_where_changes_disagree(
    research: ModuleType, bench: Bench
) -> None:
    every = Candidates(torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.arange(8))
    shift = research.MeanShift(
        bench.prompt(bench.prefill(BlendParams(mode="full"))), every, every.take(torch.tensor([1, 3, 5]))
    )
    same = torch.full((3, 2, 4), 2.0)
    assert torch.allclose(shift.mean(same), torch.full((5, 2, 4), 2.0))
    opposite = torch.stack((torch.full((2, 4), 3.0), torch.full((2, 4), -3.0), torch.zeros(2, 4)))
    assert torch.equal(shift.mean(opposite), torch.zeros(5, 2, 4))


@pytest.mark.parametrize("family", ["llama-gqa", "llama-yarn"])
def test_the_mean_shift_moves_k_before_rope(research: ModuleType, tmp_path: Path, family: str) -> None:
    """By as much as the recomputed tokens moved. llama-yarn's tables of cos and sin carry a factor: they stretch
    too."""
    bench = Bench(tmp_path, family)
    decoder, every = bench.engine.model.decoder, Candidates(torch.arange(8), torch.zeros(8).long(), torch.arange(8))
    done = bench.prefill(BlendParams(mode="full"))
    layer, repaired = decoder.layers[1], torch.tensor([1, 3, 5])
    rows = rows_of(decoder, done.sequence, torch.arange(8), 8, 8)
    old_k, old_v = torch.randn(2, 8, 2, 16)
    write_kv(layer, old_k, old_v, rows)
    shift = research.MeanShift(bench.prompt(done), every, every.take(repaired))
    shift.apply(layer, old_k[repaired] + 0.5, old_v[repaired] + 0.25)
    found_k, found_v = done.pool.read(1, rows.slots)
    stale = torch.tensor([0, 2, 4, 6, 7])
    expected = decoder.kernels.rope(old_k + 0.5, *rows.cos_sin(layer))
    torch.testing.assert_close(found_k[stale], expected[stale], rtol=0, atol=1e-5)
    torch.testing.assert_close(found_v[stale], old_v[stale] + 0.25, rtol=0, atol=1e-5)


def test_the_mean_shift_holds_at_a_later_check_layer(research: ModuleType, bench: Bench) -> None:
    """What an earlier check layer left behind is moved at the later one too."""
    checks = ((1, 0.5), (2, 0.25))
    found = [bench.prefill(BlendParams(selector="hkvd", checks=checks, correction=c)) for c in ("none", "mean-shift")]
    slots = [f.sequence.slots(torch.arange(f.plan.num_tokens)) for f in found]
    plain, shifted = ([f.pool.read(layer, s)[1] for layer in (1, 2)] for f, s in zip(found, slots, strict=True))
    assert torch.equal(plain[0], shifted[0]), "nothing is left behind yet"
    assert not torch.equal(plain[1], shifted[1])


def test_the_mean_shift_brings_reused_kv_nearer(research: ModuleType, bench: Bench) -> None:
    plain = bench.kv_error(BlendParams(selector="random", ratio=0.3, correction="none"))
    assert bench.kv_error(BlendParams(selector="random", ratio=0.3, correction="mean-shift")) < plain
