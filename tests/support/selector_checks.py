"""Checks of a selector's evidence, for selectors of the tool and of the study."""

from __future__ import annotations

import pytest
import torch
from prefill_bench import Bench
from torch import Tensor

from cacheblend_cli.blend.selectors import SELECTORS, Candidates, make_selector
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.types import BlendParams


class GivenTokens:
    """Selector of given positions, without evidence."""

    def __init__(self, positions: Tensor, needs_check_layer: bool) -> None:
        self.positions, self.needs_check_layer = positions, needs_check_layer

    def scores(self, candidates: Candidates, evidence: object) -> Tensor:
        return torch.isin(candidates.positions, self.positions).float()


def check_probe_leaves_nothing(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Check that KV written by a probe is overwritten: the logits equal those of the same tokens without a probe.

    Returns the number of chosen tokens.
    """
    probed = bench.prefill(BlendParams(selector=name, ratio=0.2))
    late = make_selector(name).needs_check_layer
    monkeypatch.setitem(SELECTORS, "given", lambda seed: GivenTokens(probed.result.chosen, late))
    given = bench.prefill(BlendParams(selector="given", ratio=0.2))
    assert torch.equal(probed.result.chosen, given.result.chosen)
    assert torch.equal(probed.result.logits, given.result.logits)
    return len(probed.result.chosen)


def check_probe_ignores_pool(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice does not depend on previous contents of the pool."""
    pool = KVPool.of(bench.engine.model.decoder, 64, 16)
    monkeypatch.setattr(bench.engine.runtime, "new_sequence", pool.new_sequence)
    chosen = []
    for before in (0.0, float("nan")):
        for cache in pool.tensors:
            cache.fill_(before)
        done = bench.prefill(BlendParams(selector=name, ratio=0.2, check_layer=2))
        assert torch.isfinite(done.result.logits).all()
        chosen.append(done.result.chosen)
        done.sequence.release()
    assert torch.equal(chosen[0], chosen[1])
