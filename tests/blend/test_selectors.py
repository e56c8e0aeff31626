"""Selectors: the tokens that each chooses given its evidence, and the evidence itself on a random model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cacheblend_kernels import AttentionParams
from prefill_bench import Bench
from selector_checks import check_probe_ignores_pool, check_probe_leaves_nothing
from torch import Tensor

from cacheblend_cli.blend import corrections, evidence
from cacheblend_cli.blend.corrections import COMMON, CORRECTIONS, Regression
from cacheblend_cli.blend.evidence import attention_peaks
from cacheblend_cli.blend.policy import BlendPolicy, policy_of
from cacheblend_cli.blend.selectors import SELECTORS, Candidates, make_selector
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.forward import write_kv
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.types import BlendParams

QUESTION = "where does Mara work?"
CANDIDATES = Candidates(
    torch.arange(12) + 3, torch.tensor([1] * 6 + [2] * 6), torch.tensor([*range(6), *range(6)])
)  # two chunks of six tokens


class Told:
    """Evidence with given values."""

    def __init__(self, **values: list[float]) -> None:
        self._values = values

    def deviation(self, candidates: Candidates) -> Tensor:
        return torch.tensor(self._values["deviation"])

    def attention(self, candidates: Candidates) -> Tensor:
        return torch.tensor(self._values["attention"])


def taken(name: str, count: int, evidence: Told | None = None) -> list[int]:
    policy = BlendPolicy(make_selector(name), ((1, count / 12),))
    return policy.select(count / 12, 12, CANDIDATES, evidence or Told()).tolist()


def peaks(*at: int) -> list[float]:
    """Falling scores at these tokens, none elsewhere."""
    return [float(len(at) - at.index(i)) if i in at else 0.0 for i in range(12)]


def test_each_selector_follows_its_evidence() -> None:
    evidence = Told(deviation=peaks(4, 9), attention=peaks(1, 8))
    assert taken("hkvd", 2, evidence) == [4, 9]
    assert taken("query", 2, evidence) == [1, 8]
    assert taken("first", 4) == [0, 1, 6, 7]
    assert taken("random", 5) == taken("random", 5)
    assert (
        make_selector("random", 1).scores(CANDIDATES, Told()).tolist()
        != make_selector("random", 2).scores(CANDIDATES, Told()).tolist()
    )


def test_a_combination_takes_its_parts_first_and_the_rest_by_its_last() -> None:
    evidence = Told(attention=peaks(9, 3, 4, 6), deviation=[0.0] * 12)
    assert taken("first:1+query", 4, evidence) == [0, 3, 6, 9]
    assert taken("first:1+query", 1, evidence) == [6], "within the parts, the higher score of the last"
    assert taken("query:1+hkvd", 3, evidence) == [0, 3, 9]
    assert make_selector("first:1+hkvd").needs_check_layer
    assert not make_selector("first:1+query").needs_check_layer


@pytest.mark.parametrize("name", ["best", "first+query", "first:x+query", "all:2+query", "first:2+none", "first:4+"])
def test_an_unknown_selector_says_what_is_known(name: str) -> None:
    with pytest.raises(UsageError) as error:
        make_selector(name)
    assert "known" in error.value.hint or "for example" in error.value.hint


def test_check_layers_and_probe_layers_are_of_the_model() -> None:
    with pytest.raises(UsageError):
        BlendParams(checks=((4, 0.3), (1, 0.1)))
    with pytest.raises(UsageError):
        policy_of(BlendParams(selector="query", probe_layers=(2, 9)), 4, True)
    with pytest.raises(UsageError, match="--check-layer 0 "):
        policy_of(BlendParams(selector="hkvd", checks=((0, 0.3), (2, 0.1))), 4, True)
    assert policy_of(BlendParams(selector="query"), 28, True).probe_layers == tuple(range(9, 23))
    assert policy_of(BlendParams(selector="query"), 1, True).probe_layers == (0,)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


EVERY = [*(n for n in SELECTORS if n not in ("all", "none")), "first:2+query", "random:1+hkvd"]


@pytest.mark.parametrize("name", EVERY)
def test_every_selector_recomputes_its_ratio_and_all_of_it_is_full_prefill(bench: Bench, name: str) -> None:
    full = bench.prefill(BlendParams(mode="full"))
    some, whole = (bench.prefill(BlendParams(selector=name, ratio=ratio)) for ratio in (0.25, 1.0))
    inexact = some.plan.cached_tokens - some.plan.exact_tokens
    assert len(some.result.chosen) == -(-inexact // 4)
    assert len(whole.result.chosen) == inexact
    assert (whole.result.logits - full.result.logits).abs().max() <= 1e-4
    assert torch.isfinite(some.result.logits).all()
    everything = BlendParams(selector=name, ratio=1.0)
    for correction in CORRECTIONS:
        found = bench.prefill(replace(everything, correction=correction))
        assert torch.equal(found.result.logits, whole.result.logits), "there is nothing left to move"


@pytest.mark.parametrize("name", ["query", "hkvd", "first:2+query"])
def test_a_probe_leaves_nothing_behind(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_probe_leaves_nothing(bench, name, monkeypatch)


@pytest.mark.parametrize("name", ["query", "hkvd"])
def test_a_probe_ignores_what_was_in_the_pool(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_probe_ignores_pool(bench, name, monkeypatch)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_look_at_keys_is_the_layers_own(window: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its sinks and within its window, a head's weight on each candidate, however many heads one product takes."""
    monkeypatch.setattr(evidence, "heads_at_once", lambda device, numbers: at_once)
    torch.manual_seed(0)
    sinks, params = torch.tensor([3.0, -1.0, 0.5, 2.0]), AttentionParams(0.3, window)
    layer = SimpleNamespace(
        index=0,
        spec=SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=8),
        kernels=SimpleNamespace(has_attention_peaks=False),
        attention=replace(params, sinks=sinks),
        latent_heads=None,
        to_keys=lambda q: q,
    )
    q, keys, positions = torch.randn(3, 4, 8), torch.randn(16, 2, 8), torch.tensor([9, 13, 15])
    pool = SimpleNamespace(layers=[None], keys=lambda layer, slots: keys)
    sequence = SimpleNamespace(pool=pool, slots_to=lambda num_tokens: slice(num_tokens))
    found = torch.zeros(16)
    attention_peaks(sequence, layer, q, positions, SimpleNamespace(attention=None), found)  # type: ignore[arg-type]
    logits = torch.einsum("rhd,khd->rhk", q, keys.repeat_interleave(2, 1)) * 0.3
    seen = torch.arange(16) <= positions[:, None]
    if window is not None:
        seen &= torch.arange(16) > positions[:, None] - window
    weights = logits.exp() * seen[:, None]
    weights = weights / (weights.sum(-1, keepdim=True) + sinks.exp()[:, None])
    torch.testing.assert_close(found, weights.amax((0, 1)))


def test_a_gpu_looks_with_all_heads_at_once_unless_the_prompt_is_long() -> None:
    per_key = 4 * 64  # the heads of a group, the question's rows
    assert evidence.heads_at_once(torch.device("cuda"), per_key * 4096) >= 8
    assert evidence.heads_at_once(torch.device("cuda"), per_key * 131072) == 1
    assert evidence.heads_at_once(torch.device("cpu"), per_key) == 1


def test_gradual_filtering_keeps_a_part_of_what_it_kept(bench: Bench) -> None:
    found = bench.prefill(BlendParams(selector="hkvd", checks=((1, 0.5), (2, 0.25))))
    once = bench.prefill(BlendParams(selector="hkvd", ratio=0.5))
    assert set(found.result.chosen.tolist()) < set(once.result.chosen.tolist())
    fresh = [report.fresh for report in found.result.layers]
    inexact = found.plan.cached_tokens - found.plan.exact_tokens
    assert fresh[:2] == [inexact, inexact]
    assert fresh[2] == -(-inexact // 2)
    assert fresh[3:] == [-(-inexact // 4)] * (len(fresh) - 3)


TWO = Candidates(torch.arange(16), torch.arange(16) // 8, torch.arange(16) % 8)  # two chunks of eight tokens
REPAIRED = torch.tensor([1, 3, 5, 9, 13])


class Moved:
    """Layer 1 of a prompt whose first 16 tokens are `every`, after a regression from given changes of REPAIRED."""

    def __init__(self, bench: Bench, every: Candidates = TWO) -> None:
        torch.manual_seed(0)
        decoder, self.done = bench.engine.model.decoder, bench.prefill(BlendParams(mode="full"))
        self.layer, self.every, self.prompt = decoder.layers[1], every, bench.prompt(self.done)
        self.rows = rows_of(decoder, self.done.sequence, torch.arange(16), 16, 16)
        self.k, self.v = torch.randn(2, 16, 2, 16)

    def by(self, k: Tensor, v: Tensor, repaired: Tensor = REPAIRED) -> tuple[Tensor, Tensor]:
        """How far K (before RoPE) and V of each token are moved, [16, 2, 16]. k, v: changes of the repaired."""
        write_kv(self.layer, self.k, self.v, self.rows)
        correction = Regression(self.prompt, self.every, self.every.take(repaired))
        correction.apply(self.layer, self.k[repaired] + k, self.v[repaired] + v)
        found_k, found_v = self.done.pool.read(1, self.rows.slots)
        cos, sin = self.rows.cos_sin(self.layer)
        stretch = cos.square() + sin.square()
        return self.layer.kernels.rope(found_k, cos / stretch, -sin / stretch) - self.k, found_v - self.v


@pytest.mark.parametrize("family", ["llama-gqa", "llama-yarn"])
def test_regression_moves_most_of_what_all_recomputed_tokens_moved(tmp_path: Path, family: str) -> None:
    """K before RoPE, whatever its tables stretch; and what is recomputed is left to be written by the layer."""
    k, v = Moved(Bench(tmp_path, family)).by(torch.full((5, 2, 16), 0.5), torch.full((5, 2, 16), 0.25))
    stale = torch.ones(16, dtype=torch.bool)
    stale[REPAIRED] = False
    assert (v[stale] > 0.15).all()
    assert (v[stale] < 0.255).all()
    torch.testing.assert_close(k[stale], 2 * COMMON * v[stale], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close((k[REPAIRED], v[REPAIRED]), (torch.zeros(5, 2, 16),) * 2, rtol=0, atol=1e-5)


def test_regression_moves_a_token_as_the_one_like_it_and_the_one_near_it(bench: Bench) -> None:
    moved, one = Moved(bench), torch.zeros(5, 2, 16)
    moved.k[0], moved.v[0] = moved.k[5] + 0.01, moved.v[5] + 0.01  # 0 is like 5, and nothing else is like anything
    one[2] = 1.0
    _, v = moved.by(one, one)
    assert v[0].mean() > v[7].mean(), "7 is nearer to 5"
    assert v[4].mean() > v[2].mean(), "as unlike, and nearer"
    assert v[2].mean() > 0.1, "of the same chunk"


def test_regression_is_not_led_by_a_token_that_changes_far_more_than_the_others(bench: Bench) -> None:
    change = torch.full((5, 2, 16), 0.1)
    plain, _ = Moved(bench).by(change, change)
    change[1] = -50.0  # of tokens 1, 3 and 5 the second
    led, _ = Moved(bench).by(change, change)
    far = torch.tensor([0, 6, 7])
    assert (plain[far] > 0).all()
    assert led[far].abs().mean() < 10


@pytest.mark.parametrize(("window", "most"), [(8, 0.02), (None, 1.0)])
def test_a_small_v_behind_a_window_moves_little(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, window: int | None, most: float
) -> None:
    """Such tokens take the attention that would go to tokens before the window."""
    moved, change = Moved(bench), torch.full((5, 2, 16), 0.5)
    monkeypatch.setattr(moved.layer, "attention", replace(moved.layer.attention, sliding_window=window))
    moved.v[6] *= 0.01
    _, v = moved.by(change, change)
    assert v[6].abs().max() < most
    assert min(v[0].min(), v[7].min()) > 0.25, "the others follow"
    assert v[6].min() > (0 if window else 0.25)


def test_regression_moves_no_token_by_a_later_chunk_and_no_v_by_another(bench: Bench) -> None:
    moved, change = Moved(bench), torch.randn(5, 2, 16)
    other = change.clone()
    other[3:] += 1  # of the second chunk
    a, b = moved.by(change, change), moved.by(other, other)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x[:8], y[:8])
        assert not torch.equal(x[8:], y[8:])
    second = moved.by(change[3:], change[3:], REPAIRED[3:])  # of the first chunk nothing is known
    assert torch.equal(second[1][:8], torch.zeros(8, 2, 16))
    torch.testing.assert_close(second[1][8:], a[1][8:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("at_once", [1, corrections.NUMBERS_AT_ONCE])
def test_regression_is_the_formula_of_each_chunk(bench: Bench, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Chunks of other sizes and with other numbers of recomputed tokens, together and one by one."""
    monkeypatch.setattr(corrections, "NUMBERS_AT_ONCE", at_once)
    sizes, repaired = [5, 4, 7], torch.tensor([1, 3, 5, 6, 7, 9, 13])
    chunk = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    offset = torch.cat([torch.arange(size) for size in sizes])
    moved, change = Moved(bench, Candidates(torch.arange(16), chunk, offset)), torch.randn(2, 7, 2, 16)
    found = torch.stack(moved.by(*change, repaired), 1).flatten(1)
    change = change.double()
    for own in torch.arange(16).split(sizes):
        is_known = torch.isin(own, repaired)
        old = [part[own].flatten(1).double() for part in (moved.k, moved.v)]
        far = sum(torch.cdist(x, x).square() / (x - x.mean(0)).square().sum(1).mean() for x in old)
        apart = (offset[own][:, None] - offset[own]).abs().double()
        alike = 2 + 0.3 * (torch.exp(-apart / 8) + torch.exp(-apart / 30)) + torch.exp(-far / 2)
        own_change = change[:, torch.isin(repaired, own)].transpose(0, 1).flatten(1)
        size = own_change.square().sum(1)
        own_change[:, :32] -= (1 - COMMON) * change[0, repaired <= own[-1]].mean(0).flatten()
        known = alike[is_known][:, is_known] + 0.5 * (size / size.mean()).clamp_min(0.1).diag()
        cross = alike[~is_known][:, is_known]
        expected = cross @ torch.linalg.solve(known, own_change)
        torch.testing.assert_close(found[own[~is_known]].double(), expected, rtol=0, atol=1e-5)


def test_tables_and_slots_of_chunks_with_one_stale_token_are_packed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels take no strided ones."""
    moved, seen = Moved(bench), []
    rope_and_cache = moved.layer.kernels.rope_and_cache
    monkeypatch.setattr(
        type(moved.layer.kernels),
        "rope_and_cache",
        lambda self, *given: seen.append(given[-1]) or rope_and_cache(*given),
    )
    known = torch.tensor([i for i in range(16) if i % 8 != 3])
    moved.by(*torch.ones(2, len(known), 2, 16), known)
    slots = seen[-1]
    assert len(slots.slots) == 2
    assert all(part.is_contiguous() for part in (slots.slots, slots.cos, slots.sin))


def test_chunks_are_solved_together_as_each_alone_on_several_threads() -> None:
    """A batch of LU fails here."""
    torch.manual_seed(0)
    x, b = torch.randn(3, 190, 190), torch.randn(3, 190, 384)
    a, threads = x @ x.mT / 190 + torch.eye(190), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        lower = torch.linalg.cholesky(a)
        together, on_a_gpu = corrections._solved(lower, b), corrections._by_triangles(lower, b)
    finally:
        torch.set_num_threads(threads)
    for one, own, *found in zip(a.double(), b.double(), together, on_a_gpu, strict=True):
        for solution in found:
            torch.testing.assert_close(solution.double(), torch.linalg.solve(one, own), rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", CORRECTIONS)
def test_a_correction_brings_reused_kv_nearer(bench: Bench, how: str) -> None:
    plain = bench.kv_error(BlendParams(selector="random", ratio=0.3, correction="none"))
    moved = BlendParams(selector="random", ratio=0.3, correction=how)
    assert bench.kv_error(moved) < plain
    assert bench.kv_error(moved) == bench.kv_error(moved)


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(UsageError):
        policy_of(BlendParams(correction="shift"), 4, True)
