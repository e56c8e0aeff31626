"""Parameters and report of a blended prefill."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.blend.corrections import CorrectionKind
from cacheblend_cli.blend.selectors import (
    Candidates,
    Combined,
    DraftAttention,
    Evidence,
    QueryAttention,
    Selector,
    budget,
    choose,
)  # fmt: skip


@dataclass(frozen=True)
class BlendPolicy:
    """Which tokens to recompute.

    checks: (layer, ratio) pairs, layers ascending and ratios descending (gradual filtering); a selector that needs no
    check layer uses the first ratio before layer 0. deviation: "v", "k" or "kv". block, nucleus: see `selectors.choose`.
    probe_layers, draft_tokens: for selectors that follow the question's attention, the layers probed and the length of
    the draft. correction: of KV that is not recomputed, None for none. layer0_exact: the stored K and V of layer 0 are
    what this run would compute (a lossless codec). row_tile: see `row_tile_of`.
    """

    selector: Selector
    checks: tuple[tuple[int, float], ...]
    deviation: str = "k"
    block: int = 1
    nucleus: float = 0.0
    probe_layers: tuple[int, ...] = (0,)
    draft_tokens: int = 0
    correction: CorrectionKind | None = None
    layer0_exact: bool = True
    row_tile: int = 1

    @property
    def needs_check_layer(self) -> bool:
        """False at ratios 0 and 1 too: there is nothing to choose, so no layer is spent on checking."""
        trivial = all(ratio in (0.0, 1.0) for _, ratio in self.checks) and (
            self.nucleus == 0 or self.checks[-1][1] == 0
        )
        return self.selector.needs_check_layer and not trivial

    @property
    def looks(self) -> tuple[str, ...]:
        """Evidence that the selector takes before layer 0: "attention", "draft"."""
        if self.selector.needs_check_layer:  # then the question's attention is looked at there
            return ()
        selector = self.selector
        every = [selector.last, *(s for s, _ in selector.parts)] if isinstance(selector, Combined) else [selector]
        kinds = (("attention", QueryAttention), ("draft", DraftAttention))
        return tuple(kind for kind, cls in kinds if any(isinstance(s, cls) for s in every))

    def is_scored(self, ratio: float, total: int, num_candidates: int, fresh: int = 0) -> bool:
        """Whether candidates have to be scored to choose among them, see `select`."""
        count = self._count(ratio, total, fresh)
        return count > 0 and (count < num_candidates or self.nucleus > 0)

    def _count(self, ratio: float, total: int, fresh: int) -> int:
        count = budget(ratio, total)
        return count + -(count + fresh) % self.row_tile if count else 0

    def select(self, ratio: float, total: int, candidates: Candidates, evidence: Evidence, fresh: int = 0) -> Tensor:
        """Indexes of the candidates to recompute: `ratio` of all `total` candidates, rounded up to fill the row tile together
        with the `fresh` rows that are computed in any case."""
        count = self._count(ratio, total, fresh)
        if not self.is_scored(ratio, total, len(candidates), fresh):
            return torch.arange(min(count, len(candidates)), device=candidates.positions.device)
        selector = self.selector
        required = selector.required(candidates, evidence) if isinstance(selector, Combined) else None
        scores = selector.scores(candidates, evidence)
        return choose(scores, count, candidates, block=self.block, nucleus=self.nucleus, required=required)


def row_tile_of(device: torch.device) -> int:
    """Row count granularity of recomputation. A GPU's matrix products work in tiles of 128 rows: filling the last tile takes
    no extra time and repairs more tokens. 1 on a CPU, where every row counts."""
    return 128 if device.type == "cuda" else 1
