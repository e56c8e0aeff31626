"""Muon (Jordan et al., 2024) in fp32, matrices of one shape taken together: bf16 products are slow on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor


class Muon:
    """Momentum, orthogonalised by five Newton-Schulz steps. parameters: 2-D; `lr` may be set before each step."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        self.lr, self.momentum = lr, momentum
        self._groups: dict[tuple[int, ...], list[Tensor]] = {}
        for p in parameters:
            self._groups.setdefault(tuple(p.shape), []).append(p)
        self._buffers = {shape: torch.zeros(len(ps), *shape) for shape, ps in self._groups.items()}

    @torch.no_grad()
    def step(self) -> None:
        for shape, parameters in self._groups.items():
            grad = torch.stack([p.grad for p in parameters if p.grad is not None])
            buffer = self._buffers[shape].lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum)) * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, u in zip(parameters, update, strict=True):
                p.add_(u, alpha=-self.lr)
                p.grad = None


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of [n, rows, cols], by the quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT
