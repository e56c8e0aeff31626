"""Corrections of KV that is not recomputed, estimated from the KV that is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from cacheblend_kernels import Regressed, RegressionPrior, Slots
from torch import Tensor

from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.forward import FreshKV, LayerWork
from cacheblend_cli.kv.pool import KVPool, upload
from cacheblend_cli.kv.rows import Rows, bucket
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.model.rope import CosSin


class Correction(ABC):
    """Created when the tokens to recompute are chosen; applied at every following layer."""

    @abstractmethod
    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        """Correct the layer's stale rows in the pool. k (before RoPE), v: fresh values of the repaired tokens,
        [num_repaired, num_kv_heads, head_dim]; the pool still holds their old values and is updated afterwards."""

    def work(self, index: Tensor) -> LayerWork | None:
        """Return `apply` as the work of a layer, where the repaired tokens are rows `index` [num_repaired] int64; None
        if it is none that a CUDA graph can hold."""
        return None


def old_kv(layer: DecoderLayer, rows: Rows) -> tuple[Tensor, Tensor]:
    """Read stored K (before RoPE) and V of `rows` from the pool at a layer, each fp32 [num_rows, num_kv_heads,
    head_dim]."""
    k, v = rows.pool.read(layer.index, rows.slots)
    return layer.kernels.rope(k, *_inverse(*rows.cos_sin(layer))), v


def _inverse(cos: Tensor, sin: Tensor) -> CosSin:
    """Return cos and sin that undo a rotation."""
    stretch = cos.square() + sin.square()  # the square of RoPE's attention factor (yarn, longrope), else 1
    return cos / stretch, -sin / stretch


class Regression(Correction):
    """Predict the change of a chunk's stale K and V from the changes of its recomputed tokens: Gaussian process
    regression, one chunk and layer at a time, over K before RoPE and V together.

    The prior correlates all tokens of a chunk (the mean shift), more strongly if they are close to each other or if
    their old K and V are similar. Recomputed tokens that disagree reduce the shift. A chunk without recomputed tokens
    is not shifted.

    V follows the mean change of its chunk and the chunks before it in full, K only by the share COMMON: a shift that
    chunks share makes every stale token harder to find, also the few that an answer copies (study/fidelity.md). With
    latent attention the keys are part of V too, so K moves in full.

    In layers with a sliding window, a small V moves less. There, tokens in mid-text with V near zero take the attention
    that would go to the beginning of the prompt; the common change would make them add a value of another size
    (study/fidelity.md).

    Later tokens of the same chunk shift a token too, later chunks never do: causal per chunk, not per token.
    """

    def __init__(self, prompt: Prompt, every: Candidates, repaired: Candidates) -> None:
        self._pool, decoder = prompt.pool, prompt.decoder
        self._given = prompt, every, repaired
        self._fused = decoder.kernels.has_correction and decoder.part.is_whole and decoder.spec.latent is None
        if self._fused:
            return
        known = torch.isin(every.positions, repaired.positions).cpu()
        lengths = every.lengths
        number = known.cumsum(0) - 1  # index among the recomputed tokens, where known
        self._repaired = prompt.rows(repaired.positions)
        # per recomputed token: number of them in its chunk and the chunks before it
        until = torch.tensor(lengths).cumsum(0).repeat_interleave(torch.tensor(lengths)) - 1
        self._so_far = upload((number + 1)[until][known], every.positions.device)
        of_size: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for tokens, there in zip(torch.arange(len(known)).split(lengths), known.split(lengths), strict=True):
            if 0 < (count := int(there.sum())) < len(tokens):
                size = len(tokens).bit_length(), count.bit_length()
                of_size.setdefault(size, []).append((tokens[~there], tokens[there]))
        width = sum(part.shape[2:].numel() for part in (prompt.pool.layers[0].k, prompt.pool.layers[0].v))
        numbers = GPU_NUMBERS_AT_ONCE if every.positions.is_cuda else NUMBERS_AT_ONCE
        self._parts = []
        for (bits, _), chunks in of_size.items():
            at_once = max(1, numbers // (width << bits))
            for start in range(0, len(chunks), at_once):
                self._parts.append(_ChunkBatch.of(prompt, every, number, chunks[start : start + at_once]))

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        if self._fused:
            self._alone.apply(layer, k, v, self._pool)
            return
        pairs = zip((k, v), old_kv(layer, self._repaired), strict=True)
        change = torch.cat([(fresh.float() - old).flatten(1) for fresh, old in pairs], -1)
        sizes = layer.part.sum_of_kv(torch.linalg.vector_norm(change, dim=-1).square_(), layer.index)
        if layer.latent_heads is None:
            of_k = change[:, : k[0].numel()]
            common = of_k.cumsum(0)[self._so_far - 1] / self._so_far[:, None]  # mean of its chunk and those before it
            of_k -= (1 - COMMON) * common
        for part in self._parts:
            part.move(self._pool, layer, change, sizes)

    @cached_property
    def _alone(self) -> CorrectionWork:
        """Work for fresh values of the repaired tokens alone."""
        prompt, every, repaired = self._given
        return CorrectionWork.of(prompt, every, repaired, torch.arange(len(repaired), device=every.positions.device))

    def work(self, index: Tensor) -> CorrectionWork | None:
        fits = self._fused and max(self._given[1].lengths) <= LONGEST_CHUNK_BUCKET
        return CorrectionWork.of(*self._given, index) if fits else None


class CorrectionWork(LayerWork):
    """A backend's own regression, over all chunks. How many tokens of a chunk were recomputed stays on the device."""

    def __init__(self, rows: Regressed, rotations: tuple[CosSin, ...], is_twin: bool = False) -> None:
        """rotations: cos and sin of each RoPE, at rows."""
        self._rows, self._rotations, self._is_twin = rows, rotations, is_twin
        self.key = len(rows.starts), bucket(rows.longest, LEAST_CHUNK_BUCKET)

    @classmethod
    def of(cls, prompt: Prompt, every: Candidates, repaired: Candidates, index: Tensor) -> CorrectionWork:
        """Build the work without waiting for the device."""
        rows, starts = prompt.rows(every.positions), every.starts
        known = torch.searchsorted(every.positions, repaired.positions, out_int32=True)
        known_starts = torch.searchsorted(known, starts, out_int32=True)
        return cls(Regressed(rows.slots, starts, known, known_starts, index, max(every.lengths)), rows.rotations)

    def fresh(self, fresh: FreshKV) -> None:
        self.apply(fresh.layer, fresh.k, fresh.v, fresh.rows.pool)

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor, pool: KVPool) -> None:
        """Correct the layer's stale rows. k (before RoPE), v: fresh values, [num_rows, num_kv_heads, head_dim]."""
        rows = replace(self._rows) if self._is_twin else self._rows  # graphs share memory: its workspace is not kept
        damped = layer.attention.sliding_window is not None
        layer.kernels.correct_stale(k, v, pool.layers[layer.index], rows, self._rotations[layer.rope], PRIOR, damped)

    def twin(self, num_rows: int, context: int) -> CorrectionWork:
        rows, longest = self._rows, bucket(self._rows.longest, LEAST_CHUNK_BUCKET)
        slots, starts = rows.slots.new_zeros(context), torch.zeros_like(rows.starts)
        known, fresh = rows.known.new_zeros(num_rows), rows.fresh.new_zeros(num_rows)
        rotations = tuple(
            (cos.new_zeros(context, cos.shape[1]), sin.new_zeros(context, sin.shape[1])) for cos, sin in self._rotations
        )
        own = Regressed(slots, starts, known, torch.zeros_like(starts), fresh, longest)
        return CorrectionWork(own, rotations, is_twin=True)

    def reset(self) -> None:
        self._rows.starts.zero_()
        self._rows.known_starts.zero_()

    def enter(self, twin: CorrectionWork, rows: Rows) -> None:
        own = self._tensors
        torch._foreach_copy_([there[: len(t)] for t, there in zip(own, twin._tensors, strict=True)], own)

    @property
    def _tensors(self) -> list[Tensor]:
        rows = self._rows
        tables = [table for rotation in self._rotations for table in rotation]
        return [rows.slots, rows.starts, rows.known, rows.known_starts, rows.fresh, *tables]


@dataclass(frozen=True)
class _ChunkBatch:
    """A batch of C chunks of similar size: S stale tokens each, followed by M recomputed (known) ones; R = S + M.

    Smaller chunks are padded with one of their known tokens, treated as uncorrelated with everything; its slot is
    overwritten anyway.
    """

    slots: Tensor  # [C, R] int64
    back: tuple[CosSin, ...]  # cos and sin [C * R, head_dim] of each RoPE, which undo the rotation of old K
    forth: tuple[CosSin, ...]  # cos and sin of each RoPE, which rotate the K of stale tokens to their positions
    own: Tensor  # [C, M] int64, indexes of the known tokens among all recomputed ones
    share: Tensor  # fp32 [C, 1, R], weight of a token in its chunk's mean
    unlike: Tensor  # fp32 [C, R, 1], infinite for padding
    placed: Tensor  # fp32 [C, M, R], correlation by distance

    @classmethod
    def of(
        cls, prompt: Prompt, every: Candidates, number: Tensor, chunks: Sequence[tuple[Tensor, Tensor]]
    ) -> _ChunkBatch:
        """Build a part. chunks: (stale, known) tokens of each chunk, as indexes of `every`, on the host; number: [n]
        int64, index of a known token among the recomputed ones."""
        stale, known = (max(len(chunk[i]) for chunk in chunks) for i in (0, 1))
        index = torch.stack([chunk[1][:1].expand(stale + known) for chunk in chunks])
        real = torch.zeros(index.shape, dtype=torch.bool)
        for row, here, (s, k) in zip(index, real, chunks, strict=True):
            row[: len(s)], row[stale : stale + len(k)] = s, k
            here[: len(s)] = here[stale : stale + len(k)] = True
        device = every.positions.device
        own, tokens = upload(number[index[:, stale:]], device), every.take(upload(index, device))
        real = upload(real, device, torch.bool)
        rows = prompt.rows(tokens.positions.flatten())
        apart = (tokens.offset[:, stale:, None] - tokens.offset[:, None]).abs()
        near = sum(torch.exp(-apart / length) for length in LENGTHS)
        placed = (CHUNK + NEAR * near) * (real[:, stale:, None] & real[:, None])
        return cls(
            rows.slots.view(index.shape),
            tuple(_inverse(cos, sin) for cos, sin in rows.rotations),
            prompt.decoder.rope.cos_sin(tokens.positions[:, :stale].flatten(), prompt.plan.num_tokens),
            own,
            (real / real.sum(1, keepdim=True))[:, None],
            torch.zeros(index.shape, device=device).masked_fill(~real, math.inf)[..., None],
            placed,
        )

    def move(self, pool: KVPool, layer: DecoderLayer, change: Tensor, sizes: Tensor) -> None:
        """Correct the stale rows of these chunks in the pool. change: changes of all recomputed tokens to follow, K
        before RoPE and V, fp32 [num_repaired, elements of K and V]. sizes: squared norms of the tokens' own changes,
        [num_repaired]."""
        (num_chunks, num_rows), num_known = self.slots.shape, self.own.shape[1]
        stale, known = slice(num_rows - num_known), slice(num_rows - num_known, None)
        old_k, old_v = pool.read(layer.index, self.slots.flatten())
        turned = layer.kernels.rope(old_k, *self.back[layer.rope])
        old = torch.cat((turned.flatten(1), old_v.flatten(1)), -1).view(num_chunks, num_rows, -1)
        apart = old - self.share @ old
        widths = (old_k[0].numel(), old_v[0].numel())
        parts = apart.split(widths, -1)
        squares = torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in parts], -1).square_()
        squares = layer.part.sum_of_kv(squares, layer.index)
        unit = (self.share @ squares).clamp_min_(1e-30)  # mean squared distance from the mean
        far = torch.baddbmm(self.unlike, squares, 0.5 / unit.mT)
        near = torch.cat([part[:, known] / unit[..., i, None] for i, part in enumerate(parts)], -1)
        if layer.part.is_whole:
            alike = torch.baddbmm(far[:, known] + far.mT, near, apart.mT, beta=-1)
        else:
            alike = layer.part.sum_of_kv(near @ apart.mT, layer.index) - far[:, known] - far.mT
        alike = alike.exp_().add_(self.placed)
        change = change.index_select(0, self.own.flatten()).view(num_chunks, num_known, -1)
        noise = torch.diag_embed(_noise(sizes[self.own], self.share[:, 0, known]))
        lower, cross = torch.linalg.cholesky_ex(alike[:, :, known] + noise).L, alike[:, :, stale]
        k, v = torch.baddbmm(old[:, stale], cross.mT, _solved(lower, change)).split(widths, -1)
        if layer.attention.sliding_window is not None:
            before = old.split(widths, -1)[1]
            v = before[:, stale].lerp(v, self._relative_size(layer, before)[:, stale])
        k, v = k.reshape(-1, *old_k.shape[1:]), v.reshape(-1, *old_v.shape[1:])
        slots = Slots(self.slots[:, stale].reshape(-1).contiguous(), *self.forth[layer.rope])
        layer.kernels.rope_and_cache(None, k, v, pool.layers[layer.index], slots)

    def _relative_size(self, layer: DecoderLayer, v: Tensor) -> Tensor:
        """Return the norm of each V relative to its chunk's mean, at most 1, fp32 [C, R, 1]. v: old V, fp32 [C, R,
        elements of V]."""
        size = layer.part.sum_of_kv(torch.linalg.vector_norm(v, dim=-1).square_(), layer.index).sqrt_()[..., None]
        return (size / (self.share @ size).clamp_min(1e-30)).clamp_max_(1)


def _solved(lower: Tensor, b: Tensor) -> Tensor:
    """Return (lower lower^T)^-1 b. lower: Cholesky factor, fp32 [C, M, M]; b: fp32 [C, M, width].

    LU (solve, inv_ex) is faster, but MKL's batched LU fails or hangs with several threads and M of about 200.
    """
    return _by_triangles(lower, b) if b.is_cuda else torch.cholesky_solve(b, lower)


def _by_triangles(lower: Tensor, b: Tensor) -> Tensor:
    """`_solved` for GPUs: up to torch 2.11 a batched `cholesky_solve` is MAGMA's, which allocates from the driver
    and synchronises on every call."""
    half = torch.linalg.solve_triangular(lower, b, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def _noise(size: Tensor, share: Tensor) -> Tensor:
    """Return the noise variance of each known token's change, fp32 [C, M].

    Proportional to the squared change, so that a few tokens that change far more than the others (attention sinks) do
    not dominate. size: squared changes, [C, M]; share: [C, M], 0 for padding.
    """
    mean = (size * share).sum(1, keepdim=True) / share.sum(1, keepdim=True)
    return NOISE * (size / mean.clamp_min(1e-30)).clamp_min_(LEAST_NOISE)


NUMBERS_AT_ONCE, GPU_NUMBERS_AT_ONCE = 1 << 22, 1 << 24
"""Maximum elements of K and V in a part with several chunks: 16 MiB in fp32, plus a handful of temporaries of that
size. 64 MiB on a GPU, where a backend without a regression of its own launches about eighty operations a part and
layer."""

CHUNK, NEAR, LENGTHS, NOISE, LEAST_NOISE = 2.0, 0.3, (8.0, 30.0), 0.5, 0.1
"""Parameters of the prior, relative to 1 for tokens with the same old K and V. CHUNK: correlation of two tokens of a
chunk. NEAR: of close tokens, decaying over LENGTHS (tokens). NOISE: a token's own part of a change of mean size.
LEAST_NOISE: minimum of that part. Doubling or halving any of them hardly changes the unexplained rest."""

LEAST_CHUNK_BUCKET, LONGEST_CHUNK_BUCKET = 64, 32_768
"""Tokens of the longest chunk in the smallest and in the largest bucket of prompts whose corrections share graphs."""

COMMON = 0.8
"""Share of the chunks' common change that K follows. 1 leaves larger outliers on long chunks, 0.65 is less accurate on
short ones (study/fidelity.md)."""

PRIOR = RegressionPrior(CHUNK, NEAR, LENGTHS, NOISE, LEAST_NOISE, COMMON)

CorrectionKind = Callable[[Prompt, Candidates, Candidates], Correction]
CORRECTIONS: dict[str, CorrectionKind] = {"regression": Regression}
