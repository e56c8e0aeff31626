"""Corrections that know in which directions a chunk's K and V change, from reading it behind other texts (after Kamera,
arXiv 2606.23581). For `nearer_ideas.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from cacheblend_kernels import Slots
from chunk_readings import Reading
from torch import Tensor

from cacheblend_cli.blend import corrections
from cacheblend_cli.blend.corrections import CHUNK, _noise, _Part
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.decoder import DecoderLayer


@dataclass(frozen=True)
class Seen:
    """What a way of moving sees of one chunk and layer: S stale tokens, followed by M known ones.

    alike: the plain prior's correlations of known and all tokens, [M, S + M]; noise: variance of each known token's
    change, [M]; change: of the known tokens, [M, width]; read: changes behind each text, [S + M, width] each, in the
    chunk's order; order: offsets of the stale and known tokens; of_k: elements of K; once: computes and keeps."""

    alike: Tensor
    noise: Tensor
    change: Tensor
    read: Sequence[Tensor]
    order: Tensor
    of_k: int
    once: Callable[[Any, Callable[[], Any]], Any]

    @property
    def stale(self) -> slice:
        return slice(self.alike.shape[1] - self.alike.shape[0])

    @property
    def known(self) -> slice:
        return slice(self.stale.stop, None)

    @property
    def parts(self) -> tuple[slice, slice]:
        """Elements of K, and of V."""
        return slice(self.of_k), slice(self.of_k, None)


Way = Callable[[Seen], Tensor | tuple[Tensor, Tensor]]
"""Returns the moves of the stale tokens, [S, width]; a pair is summed, and only its second part is damped where the
regression damps its moves of V."""


def fitted(seen: Seen, alike: Tensor, change: Tensor) -> Tensor:
    """Return what a Gaussian process predicts of the stale tokens. alike: [M, S + M]."""
    lower = torch.linalg.cholesky_ex(alike[:, seen.known] + torch.diag(seen.noise)).L
    return alike[:, seen.stale].mT @ torch.cholesky_solve(change, lower)


def plain(seen: Seen) -> Tensor:
    return fitted(seen, seen.alike, seen.change)


def projected(seen: Seen, rank: int, share: float) -> Tensor:
    """Return `plain`, with a share of it projected onto the directions of K and those of V."""
    move = plain(seen)
    for number, part in enumerate(seen.parts):
        vh = seen.once(
            ("directions", number), lambda part=part: torch.linalg.svd(torch.cat(list(seen.read))[:, part], False).Vh
        )
        own = vh[:rank]
        move[:, part] = (1 - share) * move[:, part] + share * (move[:, part] @ own.mT @ own)
    return move


def coefficients(seen: Seen, rank: int) -> Tensor:
    """Return r numbers of each token, [S + M, r], of mean square 1: its coefficients in the changes behind all texts,
    where K and V count the same."""
    u, s, _ = seen.once("coefficients", lambda: torch.linalg.svd(_scaled(seen), False))
    found = (u[:, :rank] * s[:rank])[seen.order]
    return found / found.square().sum(-1).mean().sqrt().clamp_min(1e-20)


def _scaled(seen: Seen) -> Tensor:
    """Return the changes behind all texts side by side, K and V each of mean square 1, [S + M, width of all]."""
    parts = [r[:, part] for r in seen.read for part in seen.parts]
    return torch.cat([part / part.square().mean().sqrt().clamp_min(1e-20) for part in parts], -1)


def by_coefficients(seen: Seen, rank: int, weight: float, how: str) -> Tensor:
    """Return moves that are linear in the coefficients: alone, with the plain process on the residual, or jointly
    with it. weight: prior variance of the linear part."""
    phi = coefficients(seen, rank)
    linear = weight * (phi[seen.known] @ phi.mT)
    if how == "joint":
        return fitted(seen, seen.alike + linear, seen.change)
    alone = linear + CHUNK
    move = fitted(seen, alone, seen.change)
    if how == "alone":
        return move
    lower = torch.linalg.cholesky_ex(alone[:, seen.known] + torch.diag(seen.noise)).L
    there = alone[:, seen.known] @ torch.cholesky_solve(seen.change, lower)
    return move + fitted(seen, seen.alike, seen.change - there)


def by_own_change(
    seen: Seen,
    rank: int = 0,
    bits: int = 0,
    fixed: float | None = None,
    only: str = "kv",
    free: bool = False,
    usual: float = 0.0,
    tokens: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return each token's own change behind other texts (their mean), times one number for K and one for V, and the
    plain process on the residual. rank: of its directions, 0 for all; bits: of a number, 0 for fp32; fixed: the number
    to multiply with, None: fitted to the known tokens, as if `tokens` more of them had shown `usual`; only: "k", "v" or
    "kv"; free: whether the own change is never damped."""
    mean, weight = seen.once(("own", rank, bits), lambda: _own(seen, rank, bits))[seen.order], 1 / seen.noise[:, None]
    for name, part in zip("kv", seen.parts, strict=True):
        there = mean[seen.known, part]
        size = (weight * there.square()).sum()
        more = size * tokens / len(there)
        number = ((weight * there * seen.change[:, part]).sum() + usual * more) / (1.1 * size + more).clamp_min(1e-20)
        mean[:, part] *= (number if fixed is None else fixed) if name in only else 0.0
    moves = fitted(seen, seen.alike, seen.change - mean[seen.known])
    return (mean[seen.stale], moves) if free else mean[seen.stale] + moves


def _own(seen: Seen, rank: int, bits: int) -> Tensor:
    """Return the mean change, with so many directions of K and of V, or rounded to bits."""
    parts = [torch.stack(list(seen.read)).mean(0)[:, part] for part in seen.parts]
    if rank:
        found = [torch.linalg.svd(part, False) for part in parts]
        parts = [u[:, :rank] * s[:rank] @ vh[:rank] for u, s, vh in found]
    return rounded(torch.cat(parts, -1), bits) if bits else torch.cat(parts, -1)


def rounded(x: Tensor, bits: int, group: int = 32) -> Tensor:
    """Round groups of numbers to 2 ** bits - 1 levels."""
    levels, groups = 2 ** (bits - 1) - 1, x.unflatten(-1, (-1, group))
    unit = (groups.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-20)
    return ((groups / unit).round() * unit).flatten(-2)


@dataclass(frozen=True)
class DirectedPart(_Part):
    """One chunk, moved in a way that sees its reading. order: [S + M] offsets of its stale and known tokens."""

    key: bytes = b""
    order: Tensor = field(default_factory=lambda: torch.empty(0))
    way: Way = plain
    kind: str = ""
    texts: int = 0
    readings: Mapping[bytes, Reading] | None = None

    def move(self, pool: KVPool, layer: DecoderLayer, change: Tensor, sizes: Tensor) -> None:
        """Do what `_Part.move` does for one chunk, with the moves of `way`."""
        assert self.readings is not None
        num_rows, num_known = self.slots.shape[1], self.own.shape[1]
        stale, known = slice(num_rows - num_known), slice(num_rows - num_known, None)
        old_k, old_v = pool.read(layer.index, self.slots.flatten())
        turned = layer.kernels.rope(old_k, *self.back[layer.rope])
        old = torch.cat((turned.flatten(1), old_v.flatten(1)), -1)
        noise = _noise(sizes[self.own], self.share[:, 0, known])[0]
        widths = (old_k[0].numel(), old_v[0].numel())
        reading, what = self.readings[self.key], (self.kind, self.texts, layer.index)
        read = [of[layer.index] for of in reading.changes[self.kind][: self.texts]]
        alike = self._alike(old, widths)
        seen = Seen(
            alike,
            noise,
            change[self.own[0]],
            read,
            self.order,
            widths[0],
            lambda key, make: reading.once((*what, key), make),
        )
        moves = self.way(seen)
        free, moves = moves if isinstance(moves, tuple) else (None, moves)
        k, v = (old[stale] + moves).split(widths, -1)
        if layer.attention.sliding_window is not None:
            before = old.split(widths, -1)[1][None]
            v = before[0, stale].lerp(v, self._relative_size(layer, before)[0, stale])
        if free is not None:
            k, v = k + free[:, : widths[0]], v + free[:, widths[0] :]
        k, v = k.reshape(-1, *old_k.shape[1:]).contiguous(), v.reshape(-1, *old_v.shape[1:]).contiguous()
        slots = Slots(self.slots[0, stale].contiguous(), *self.forth[layer.rope])
        layer.kernels.rope_and_cache(None, k, v, pool.layers[layer.index], slots)

    def _alike(self, old: Tensor, widths: tuple[int, int]) -> Tensor:
        """Return the plain prior's correlations of known and all tokens, [M, R]."""
        known, found = len(old) - self.own.shape[1], self.placed[0].clone()
        apart = torch.zeros_like(found)
        for part in (old - old.mean(0)).split(widths, -1):
            unit = part.square().sum(-1).mean().clamp_min(1e-30)
            apart += torch.cdist(part[known:], part).square() / (2 * unit)
        return found + (-apart).exp()


@contextmanager
def directed(readings: Mapping[bytes, Reading], way: Way, kind: str = "unrelated", texts: int = 2) -> Iterator[None]:
    """Let the regression move chunks in a way that sees their readings behind texts of a kind."""

    def of(prompt: Prompt, every: Candidates, number: Tensor, chunks: Sequence[tuple[Tensor, Tensor]]) -> DirectedPart:
        [(stale, known)] = chunks
        part, tokens = _Part.of(prompt, every, number, chunks), torch.cat((stale, known))
        key = prompt.plan.segments[int(every.chunk[tokens[0]])].key
        assert key is not None
        fields = {name: getattr(part, name) for name in _Part.__dataclass_fields__}
        return DirectedPart(
            **fields, key=key, order=every.offset[tokens], way=way, kind=kind, texts=texts, readings=readings
        )

    class One:
        """Builds parts of one chunk each."""

    One.of = staticmethod(of)  # type: ignore[attr-defined]
    with patch.object(corrections, "_Part", One), patch.object(corrections, "NUMBERS_AT_ONCE", 1):
        yield


def ways() -> dict[str, Way]:
    """Return the ways of moving by name."""
    found: dict[str, Way] = {"plain again": plain, "all directions": partial(projected, rank=10**6, share=1.0)}
    found |= {f"r {r}, share {s:g}": partial(projected, rank=r, share=s) for r in (1, 2, 4) for s in (1.0, 0.5)}
    found |= {
        f"coefficients {how}, r {r}, {w:g}": partial(by_coefficients, rank=r, weight=w, how=how)
        for how in ("alone", "first", "joint")
        for r in (2, 4)
        for w in (0.5, 2.0)
    }
    found |= {f"own change, r {r}": partial(by_own_change, rank=r) for r in (0, 1, 4, 16, 32)}
    found |= {f"own change, {bits} bits": partial(by_own_change, bits=bits) for bits in (2, 4)}
    found |= {f"own change of {only}": partial(by_own_change, only=only, free=True) for only in ("k", "v")}
    found |= {
        "own change, free": partial(by_own_change, free=True),
        "own change, free, 4 bits": partial(by_own_change, free=True, bits=4),
        "own change, free, r 16": partial(by_own_change, free=True, rank=16),
        "own change, free, usual .5 of 10": partial(by_own_change, free=True, usual=0.5, tokens=10),
        "own change, free, usual .5 of 30": partial(by_own_change, free=True, usual=0.5, tokens=30),
        "own change, free, usual .5 of 10, 4 bits": partial(by_own_change, free=True, usual=0.5, tokens=10, bits=4),
        "own change, usual .5 of 10": partial(by_own_change, usual=0.5, tokens=10),
        "own change, free, times .5": partial(by_own_change, free=True, fixed=0.5),
    }
    return found | {f"own change times {f:g}": partial(by_own_change, fixed=f) for f in (0.5, 1.0)}
