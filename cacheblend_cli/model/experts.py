"""Mixture of experts in place of a layer's MLP, or beside it, and routers that choose groups of experts before
experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheblend_cli.model.linear import STEADY_ROWS, Linear, MappedLinear, linear
from cacheblend_cli.model.mlp import MLP
from cacheblend_cli.model.module_weights import ModuleWeights, Norm
from cacheblend_cli.model.spec import ExpertsSpec

MOST_ROWS = 4096  # rows per pass: with fewer, an expert's weights are read for few rows each time


class Experts:
    """A router chooses per_token experts for each row. Rows are sorted by expert, and each chosen expert computes its
    rows in one product. The row counts are read from the device, so a CUDA graph cannot capture it."""

    def __init__(self, weights: ModuleWeights, experts: ExpertsSpec) -> None:
        self._spec, self._activation, self._kernels = experts, weights.spec.activation, weights.kernels
        self._router = weights.product("router")
        routed, correction = experts.routing is not None, weights.optional("router_correction")
        self._routing = Router(experts, weights.tensor("router.weight"), correction) if routed else None
        self._shared_gate = weights.optional("shared_gate.weight")
        self._up, self._down = (_each(len(experts.on_rank), weights, name) for name in ("experts_up", "experts_down"))
        self._shared = MLP(weights) if experts.shared_width else None
        self._expert_scale = weights.optional("expert_scale")

    def __call__(self, h: Tensor, router_input: Tensor | None = None) -> Tensor:
        """h: [num_rows, hidden_size]. Returns the same shape. router_input: the router's input, by default h."""
        parts = zip(h.split(MOST_ROWS), (h if router_input is None else router_input).split(MOST_ROWS), strict=True)
        out = torch.cat([self._rows(*part) for part in parts])
        if self._shared is None:
            return out
        if self._shared_gate is None:
            return out + self._shared(h)
        return out + torch.sigmoid(F.linear(h, self._shared_gate)) * self._shared(h)

    def _rows(self, h: Tensor, router_input: Tensor) -> Tensor:
        weights, chosen = (self._routing or self._chosen)(router_input)
        order = chosen.flatten().argsort(stable=True)
        rows, shares = order // self._spec.per_token, weights.flatten()[order].to(h.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=self._spec.count).tolist()
        held = self._spec.on_rank
        out, start = torch.zeros_like(h), sum(counts[: held.start])
        for up, down, count in zip(self._up, self._down, counts[held.start : held.stop], strict=True):
            if not count:
                continue
            mine = slice(start, start + count)
            added = down(self._activated(up(_steady(h[rows[mine]], len(h)))))[:count]
            out.index_add_(0, rows[mine], added * shares[mine, None])
            start += count
        return out

    def _chosen(self, h: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self._router(h).softmax(-1, dtype=torch.float32).topk(self._spec.per_token, dim=-1)
        if self._spec.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights if self._expert_scale is None else weights * self._expert_scale[chosen], chosen

    def _activated(self, gate_up: Tensor) -> Tensor:
        """gate_up: [num_rows, 2 * width]. Returns [num_rows, width]."""
        if self._spec.clamped is None:
            return self._kernels.act_and_mul(gate_up, self._activation)
        alpha, limit = self._spec.clamped
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)


class Router:
    """A router in DeepSeek's style, see `Routing`. It computes in fp32. weight: [count, hidden_size]; correction:
    [count] fp32, or None."""

    def __init__(self, experts: ExpertsSpec, weight: Tensor, correction: Tensor | None) -> None:
        assert experts.routing is not None
        self._experts, self._routing = experts, experts.routing
        self._scores, self._correction = Linear(weight.float()), correction

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (fp32) and indexes of each row's experts, both [num_rows, per_token]."""
        logits = self._scores(h.float())
        scores = logits.sigmoid() if self._routing.sigmoid else logits.softmax(-1)
        wanted = scores if self._correction is None else scores + self._correction
        chosen = self._in_best_groups(wanted).topk(self._experts.per_token).indices
        weights = scores.gather(1, chosen)
        if self._experts.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self._routing.factor, chosen

    def _in_best_groups(self, wanted: Tensor) -> Tensor:
        """Return `wanted` with -inf for the experts of other groups."""
        routing = self._routing
        if routing.groups_kept == routing.groups:
            return wanted
        grouped = wanted.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(2).values.sum(-1) if routing.sigmoid else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.groups_kept).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)


class ExpertsBeside:
    """Experts beside a layer's MLP (Gemma 4): norm(MLP's output) + norm(experts of the normed residual stream). norms:
    "dense_out", "experts_in" and "experts_out" of the layer."""

    def __init__(
        self, weights: ModuleWeights, experts: ExpertsSpec, norms: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> None:
        scale = weights.tensor("router_scale").float() * weights.spec.hidden_size**-0.5
        self._experts = Experts(weights, experts)
        self._router_norm = Norm(weights.kernels, scale, weights.spec.rms_norm_eps)
        self._dense_out, self._in, self._out = (norms[n] for n in ("dense_out", "experts_in", "experts_out"))

    def __call__(self, dense: Tensor, residual: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        """dense: the MLP's output; residual: its input before the norm; both [num_rows, hidden_size]. summed: sums the
        experts' results over ranks."""
        routed = self._experts(self._in(residual), self._router_norm(residual))
        return self._dense_out(dense) + self._out(summed(routed))


def _steady(own: Tensor, num_rows: int) -> Tensor:
    """Pad an expert's rows with zeros, so that a row's result does not depend on the routing of other rows."""
    missing = STEADY_ROWS - len(own)
    return F.pad(own, (0, 0, 0, missing)) if missing > 0 and num_rows >= STEADY_ROWS and not own.is_cuda else own


def _each(count: int, weights: ModuleWeights, name: str) -> list[Linear | MappedLinear]:
    """Return one product per expert."""
    weight, biases = weights.weights[f"{name}.weight"], weights.optional(f"{name}.bias")
    rows = [slice(i * len(weight) // count, (i + 1) * len(weight) // count) for i in range(count)]
    return [linear(weight[own], None if biases is None else biases[own]) for own in rows]
