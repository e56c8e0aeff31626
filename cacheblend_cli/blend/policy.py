"""What a blended prefill is told, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from cacheblend_cli.blend.corrections import CorrectionKind
from cacheblend_cli.blend.selectors import Candidates, Combined, Evidence, Selector, budget, choose


class Status(IntEnum):
    DECODE = -1
    PREFILL = 0
    CHECK = 1
    AFTER_CHECK = 2


@dataclass(frozen=True)
class BlendPolicy:
    """What to recompute. checks: (layer, ratio) pairs, layers rising and ratios falling (gradual filtering); a selector
    that needs no check layer uses the ratio of the first one before layer 0. deviation: "v", "k" or "kv".
    block, nucleus: see `selectors.choose`. probe_layers, draft_tokens: where a selector that follows the question's
    attention looks, and how many tokens of the answer it drafts. correction: of what
    is not recomputed, None for none.
    layer0_exact: the stored K and V of layer 0 are what this run would compute (a lossless codec). row_tile: see
    `row_tile_of`."""

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
        """False for ratios 0 and 1 too: there is nothing to choose, so no layer is spent on checking."""
        trivial = all(ratio in (0.0, 1.0) for _, ratio in self.checks) and (
            self.nucleus == 0 or self.checks[-1][1] == 0
        )
        return self.selector.needs_check_layer and not trivial

    def select(self, ratio: float, total: int, candidates: Candidates, evidence: Evidence, fresh: int = 0) -> Tensor:
        """Indexes of the candidates to recompute: a share `ratio` of all `total` there were, and what then fills the tile up
        with them and the `fresh` rows that are computed in any case."""
        count = budget(ratio, total)
        if count:
            count += -(count + fresh) % self.row_tile
        if count == 0 or (count >= len(candidates) and self.nucleus == 0):  # there is nothing to ask
            return torch.arange(min(count, len(candidates)), device=candidates.positions.device)
        selector = self.selector
        required = selector.required(candidates, evidence) if isinstance(selector, Combined) else None
        scores = selector.scores(candidates, evidence)
        return choose(scores, count, candidates, block=self.block, nucleus=self.nucleus, required=required)


def row_tile_of(device: torch.device) -> int:
    """Rows that are computed come in whole tiles of so many. A GPU's matrix products work in tiles of 128 rows, and 669 rows
    fill six of them to 87 %: what fills the last one takes no more time there, and repairs more. On a CPU every row counts."""
    return 128 if device.type == "cuda" else 1


@dataclass(frozen=True)
class LayerReport:
    """One layer of a blended prefill. fresh: reusable tokens whose KV or hidden state was computed at this layer."""

    layer: int
    status: Status
    rows: int
    fresh: int
