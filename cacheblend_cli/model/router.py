"""Routers that choose groups of experts before experts."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_cli.model.linear import Linear
from cacheblend_cli.model.spec import ExpertsSpec


class Router:
    """A router of DeepSeek's kind, see `Routing`. It computes in fp32.

    weight: [count, hidden_size]; correction: [count] fp32, None for none.
    """

    def __init__(self, experts: ExpertsSpec, weight: Tensor, correction: Tensor | None) -> None:
        assert experts.routing is not None
        self._experts, self._routing = experts, experts.routing
        self._scores, self._correction = Linear(weight.float(), pack=False), correction

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, fp32, and indexes of the experts of each row, both [num_rows, per_token]."""
        logits = self._scores(h.float())
        scores = logits.sigmoid() if self._routing.sigmoid else logits.softmax(-1)
        wanted = scores if self._correction is None else scores + self._correction
        chosen = self._in_best_groups(wanted).topk(self._experts.per_token).indices
        weights = scores.gather(1, chosen)
        if self._experts.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self._routing.factor, chosen

    def _in_best_groups(self, wanted: Tensor) -> Tensor:
        """wanted, -inf for the experts of other groups."""
        routing = self._routing
        if routing.groups_kept == routing.groups:
            return wanted
        grouped = wanted.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(2).values.sum(-1) if routing.sigmoid else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.groups_kept).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
