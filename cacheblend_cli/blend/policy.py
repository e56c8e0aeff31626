"""Parameters and report of a blended prefill."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.blend.corrections import CORRECTIONS, CorrectionKind
from cacheblend_cli.blend.selectors import (
    Candidates,
    Combined,
    Evidence,
    QueryAttention,
    Selector,
    budget,
    choose,
    make_selector,
)  # fmt: skip
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import BlendParams

MOST_OMITTED = 0.1
"""Share of a prompt's recomputed tokens that filling tiles may leave out: more raises the KL (study/models.md)."""


@dataclass(frozen=True)
class BlendPolicy:
    selector: Selector
    # (layer, ratio), layers ascending, ratios descending (gradual filtering); without a check layer the first ratio
    # applies before layer 0
    checks: tuple[tuple[int, float], ...]
    deviation: str = "k"  # "v", "k" or "kv"
    block: int = 1  # run length in tokens, see `selectors.choose`
    probe_layers: tuple[int, ...] = (0,)  # layers probed by selectors that follow the question's attention
    correction: CorrectionKind | None = None  # correction of KV that is not recomputed; None: no correction
    layer0_exact: bool = True  # stored K and V of layer 0 equal what this run would compute (lossless codec)
    row_tile: int = 1  # see `row_tile_of`

    @property
    def needs_check_layer(self) -> bool:
        """Return whether a layer is spent on checking. False at ratios 0 and 1 too: there is nothing to choose."""
        trivial = all(ratio in (0.0, 1.0) for _, ratio in self.checks)
        return self.selector.needs_check_layer and not trivial

    @property
    def probes(self) -> bool:
        """Return whether the question runs alone before layer 0, for its attention."""
        if self.selector.needs_check_layer:  # the question's attention is then taken at the check layer
            return False
        selector = self.selector
        every = [selector.last, *(s for s, _ in selector.parts)] if isinstance(selector, Combined) else [selector]
        return any(isinstance(s, QueryAttention) for s in every)

    def is_scored(self, ratio: float, total: int, num_candidates: int, fresh: int = 0) -> bool:
        """Return whether candidates have to be scored to choose among them, see `select`."""
        count = self._count(ratio, total, fresh)
        return 0 < count < num_candidates

    def _count(self, ratio: float, total: int, fresh: int) -> int:
        return tiled_count(budget(ratio, total), total, fresh, self.row_tile)

    def select(self, ratio: float, total: int, candidates: Candidates, evidence: Evidence, fresh: int = 0) -> Tensor:
        """Return the indexes of the candidates to recompute: `ratio` of all `total` candidates, rounded as
        `tiled_count` does."""
        count = self._count(ratio, total, fresh)
        if not self.is_scored(ratio, total, len(candidates), fresh):
            return torch.arange(min(count, len(candidates)), device=candidates.positions.device)
        selector = self.selector
        required = selector.required(candidates, evidence) if isinstance(selector, Combined) else None
        scores = selector.scores(candidates, evidence)
        return choose(scores, count, candidates, block=self.block, required=required)


def row_tile_of(device: torch.device) -> int:
    """Return the row count granularity of recomputation: 128 on a GPU, 1 on a CPU. A GPU's matrix products work in
    tiles of 128 rows, and a tile that is not full takes as long as a full one."""
    return 128 if device.type == "cuda" else 1


def tiled_count(count: int, total: int, fresh: int, row_tile: int) -> int:
    """Return how many of `total` candidates to recompute, so that they and the `fresh` rows fill whole tiles: the
    number nearest to `count`, or the next higher one if the nearest leaves out more than the share MOST_OMITTED. None
    and all of them stay as they are. May exceed `total`."""
    if count in (0, total):
        return count
    over = (count + fresh) % row_tile
    return count - over if over < row_tile / 2 and over <= MOST_OMITTED * count else count + -over % row_tile


def policy_of(params: BlendParams, num_layers: int, layer0_exact: bool, row_tile: int = 1) -> BlendPolicy:
    """Return the policy for a model with num_layers layers. row_tile: see `row_tile_of`.

    Raises UsageError for an unknown name, and for a check layer that the model does not have."""
    if params.correction != "none" and params.correction not in CORRECTIONS:
        raise UsageError(f"unknown correction {params.correction!r}", f"known: {', '.join(CORRECTIONS)}, none")
    selector = make_selector(params.selector, params.seed)
    checks = params.checks or ((params.check_layer, params.ratio),)
    wrong = [layer for layer, _ in checks if not 1 <= layer < num_layers]
    if params.effective_ratio() in (0.0, 1.0):
        checks = ((1, params.effective_ratio()),)
    elif params.checks and not selector.needs_check_layer:
        raise UsageError(
            f"the selector {params.selector} chooses before layer 0, and has no check layers",
            "hkvd chooses at check layers",
        )
    elif selector.needs_check_layer and wrong:
        raise UsageError(
            f"--check-layer {wrong[0]} is not among layers 1 to {num_layers - 1}",
            "layer 0 has no deviation: its K and V depend on the token alone",
        )
    return BlendPolicy(
        selector=selector,
        checks=checks,
        deviation=params.deviation,
        block=params.block,
        probe_layers=_probed(params, num_layers),
        correction=CORRECTIONS.get(params.correction),
        layer0_exact=layer0_exact,
        row_tile=row_tile,
    )


def _probed(params: BlendParams, num_layers: int) -> tuple[int, ...]:
    """Return the layers to probe, by default middle ones: they retrieve, while the first layers attend to neighbours
    and the last ones predict the next token."""
    first, last = params.probe_layers or (round(num_layers / 3), max(0, round(num_layers * 5 / 6) - 1))
    if not 0 <= first <= last < num_layers:
        raise UsageError(
            f"the probe layers {first}-{last} are not among layers 0 to {num_layers - 1}", "for example 2-4"
        )
    return tuple(range(first, last + 1))
