"""The typed interface every kernel backend implements.

Queries are *rows*: ``[num_rows, num_heads, head_dim]``, each with a position in its sequence. Fresh K and V of rows are
``[num_rows, num_kv_heads, head_dim]``. A slot of the paged pool is ``block * block_size + offset``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class KernelError(Exception):
    """Raised if a backend cannot run here, or no kernel accepts an input. `hint` names the next step."""

    exit_code = 5

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class LayerCache:
    """The paged pool of one layer. A float8_e4m3fn pool holds values divided by their scale, saturated."""

    # rotated, [num_blocks, block_size, num_kv_heads, head_dim], contiguous; with latent attention position keys
    k: Tensor
    v: Tensor  # as k; with latent attention latents, with another head_dim
    k_scale: Tensor | None = None  # [num_kv_heads] fp32 of a float8_e4m3fn pool, None for other pools
    v_scale: Tensor | None = None  # as k_scale

    @cached_property
    def addresses(self) -> tuple[int, int] | None:
        """Addresses of K and V in host memory; None unless both are contiguous there, with one shape and dtype."""
        k, v = self.k, self.v
        alike = k.is_cpu and v.is_cpu and k.dtype == v.dtype and k.shape == v.shape
        return (k.data_ptr(), v.data_ptr()) if alike and k.is_contiguous() and v.is_contiguous() else None


@dataclass(frozen=True)
class StoredKV:
    """Unrotated K and V of a chunk's rows in one of the stored formats.

    - float16, bfloat16, float32: k, v [num_rows, num_kv_heads, head_dim], no scales;
    - float8_e4m3fn: the same shape, multiplied by k_scale, v_scale [1, num_kv_heads] fp32;
    - uint8: K = mixed(k_levels[codes] * k_scale) + k_mean, V = mixed(v_levels[codes] * v_scale), with k_scale, v_scale
      [num_rows, num_kv_heads] and k_mean [1, num_kv_heads, head_dim] bfloat16, and k_levels, v_levels [2^bits]
      fp32. The codes of a head are packed in planes of PLANES[bits] bits, low bits first: byte j of the n of a plane
      has the codes of channels j, j + n, j + 2 n, ..., from its low bits up. mixed: see `torch_backend.mixed`.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_mean: Tensor | None = None
    k_levels: Tensor | None = None
    v_levels: Tensor | None = None

    @property
    def bits(self) -> tuple[int, int]:
        """Bits per code of K and of V; 0 for values that are not codes."""
        return bits_of((self.k_levels, self.v_levels))


class StagedTensor(NamedTuple):
    """A tensor of a chunk at the first of several layers, in a buffer."""

    start: int  # byte
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def at(self, data: Tensor, offset: int = 0) -> Tensor:
        """Return the tensor as a view of data [num_bytes] uint8. offset: bytes from the first layer to another one."""
        return data[self.start + offset : self.end + offset].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StagedChunk:
    """A chunk's tensors in a buffer, named and shaped as in `StoredKV`, but with all stored heads."""

    tensors: Mapping[str, StagedTensor]
    layer_bytes: int  # from a layer to the next one

    @property
    def num_rows(self) -> int:
        return self.tensors["k"].shape[0]


@dataclass(frozen=True)
class StoredLayers:
    """Unrotated K and V of several chunks of one stored format, at adjacent layers of one shape, in one buffer."""

    data: Tensor  # [num_bytes] uint8
    chunks: tuple[StagedChunk, ...]
    table: Tensor  # [num_chunks, 7] int64, `layers_table(chunks)` on the device of data
    row_chunks: Tensor  # [num_rows] int32, index of each row's chunk
    k_levels: Tensor | None = None  # as in `StoredKV`
    v_levels: Tensor | None = None
    first_head: int = 0  # of the stored heads that the caches hold


def layers_table(chunks: Sequence[StagedChunk]) -> list[list[int]]:
    """Return, for each chunk, its first row, the first bytes of k, v, k_scale, v_scale and k_mean (0: not stored), and
    the bytes of a layer."""
    rows, first = [], 0
    for chunk in chunks:
        starts = [chunk.tensors[name].start if name in chunk.tensors else 0 for name in STORED]
        rows.append([first, *starts, chunk.layer_bytes])
        first += chunk.num_rows
    return rows


STORED = ("k", "v", "k_scale", "v_scale", "k_mean")
"""Names of a chunk's tensors, see `StoredKV`."""
PLANES = {7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1)}
"""Bits of a code in `StoredKV` -> bits of its planes."""


def bits_of(levels: tuple[Tensor | None, Tensor | None]) -> tuple[int, int]:
    """Return the bits per code of K and of V with these levels; 0 without levels."""
    k, v = (0 if x is None else x.shape[0].bit_length() - 1 for x in levels)
    return k, v


def packed_bytes(dim: int, bits: int) -> int:
    """Return the bytes of a head's codes."""
    return sum(-(-dim * plane // 8) for plane in PLANES[bits])


@dataclass(frozen=True)
class Slots:
    """Slot mapping of rows, and the rotation applied on the way to the pool."""

    slots: Tensor  # [num_rows] int64
    cos: Tensor  # [num_rows, head_dim] fp32 at the rows' positions (the two halves equal, rotate-half convention)
    sin: Tensor  # as cos
    # the first slot if the slots are known to be consecutive (first_slot, first_slot + 1, ...), else -1
    first_slot: int = -1

    @cached_property
    def addresses(self) -> tuple[int, int, int] | None:
        """Addresses of slots, cos and sin in host memory; None unless contiguous there, with the shapes above."""
        slots, cos, sin = self.slots, self.cos, self.sin
        fits = slots.is_cpu and cos.is_cpu and sin.is_cpu and slots.dtype == torch.int64 and slots.ndim == 1
        fits = fits and cos.shape == sin.shape and cos.dtype == sin.dtype == torch.float32 and len(cos) == len(slots)
        if not (fits and slots.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            return None
        return slots.data_ptr(), cos.data_ptr(), sin.data_ptr()


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of a layer's attention: softmax(cap(q k^T * scale)) v over the keys that a row sees."""

    scale: float
    # a row at position p sees the keys at max(0, p - sliding_window + 1) .. p; None: at 0 .. p
    sliding_window: int | None = None
    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    sinks: Tensor | None = None  # [num_heads] fp32, an extra logit per head in every row's softmax, without a value

    @property
    def plain(self) -> bool:
        """Return whether this is plain causal softmax attention: no window, cap or sinks."""
        return self.sliding_window is None and self.soft_cap is None and self.sinks is None


@dataclass(frozen=True)
class LatentHeads:
    """Up-projections of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token has one latent c [rank] and one rotated position key p [rope_dim]. Its key for head h is (keys[h] c, p), its
    value is values[h] c.
    """

    keys: Tensor  # [num_heads, nope_dim, rank]
    values: Tensor  # [num_heads, v_dim, rank]


@dataclass(frozen=True)
class AttentionMetadata:
    """Batch metadata of one launch: the positions of the rows, and where the keys of their sequences are.

    Rows of one sequence are adjacent and their positions strictly increase; gaps are allowed. A row at position p
    attends to keys at positions <= p of its own sequence and to no others. In a launch of decode attention every
    sequence has one row, at position kv_len - 1. Rows after those of the sequences are padding: they see no key, and
    their attention output is 0.
    """

    positions: Tensor  # [num_rows] int64, position of each row in its sequence
    cu_rows: Tensor  # [num_seqs + 1] int32, rows of sequence i are cu_rows[i]:cu_rows[i+1]
    block_table: Tensor  # [num_seqs, max_blocks] int32, block of each run of block_size positions
    kv_lens: Tensor  # [num_seqs] int32, number of positions of the sequence whose K and V are in the pool
    # maximum of kv_lens, known without a device synchronisation; 0 if unknown, and a launch is then planned for the
    # capacity of block_table
    max_kv_len: int = 0
    # per sequence, the first slot if its blocks are adjacent in the pool (its keys are then a view), else -1; () if
    # unknown
    contiguous_slots: tuple[int, ...] = ()

    @cached_property
    def addresses(self) -> tuple[int, int] | None:
        """Addresses of block_table and kv_lens in host memory; None unless contiguous there, with the shapes above."""
        table, lens = self.block_table, self.kv_lens
        fits = table.is_cpu and lens.is_cpu and table.dtype == lens.dtype == torch.int32 and len(table) == len(lens)
        return (table.data_ptr(), lens.data_ptr()) if fits and table.is_contiguous() and lens.is_contiguous() else None

    @property
    def num_rows(self) -> int:
        return int(self.positions.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.kv_lens.shape[0])

    @property
    def contiguous_slot(self) -> int:
        """First slot of the only sequence; -1 if there are several."""
        return self.contiguous_slots[0] if len(self.contiguous_slots) == 1 else -1


@dataclass(frozen=True)
class RegressionPrior:
    """Prior of the changes of a chunk's K and V: covariances of two rows, relative to 1 for rows with equal K and V."""

    of_chunk: float  # of any two rows of a chunk
    of_near: float  # of neighbours, decaying over each of `lengths`
    lengths: tuple[float, float]  # in tokens
    noise: float  # variance of the own part of a change of mean size
    least_noise: float  # minimum of that part, relative to it
    common: float  # share of the chunks' common change that K follows


@dataclass(frozen=True)
class Regressed:
    """Rows of the chunks whose stale KV is corrected: all rows of a chunk are adjacent, the chunks are in order.

    Tensors may be longer than needed: rows from starts[-1] and known rows from known_starts[-1] on are not read, and a
    chunk without rows changes nothing."""

    slots: Tensor  # [num_rows] int64
    starts: Tensor  # [num_chunks + 1] int32, rows of chunk i are starts[i]:starts[i+1]
    known: Tensor  # [num_known] int32, sorted, the rows that were recomputed
    known_starts: Tensor  # [num_chunks + 1] int32, known rows of chunk i are known[known_starts[i]:known_starts[i+1]]
    fresh: Tensor  # [num_known] int64, the rows of the fresh k and v that are the known ones
    longest: int  # maximum rows of a chunk


class KernelBackend(ABC):
    """One implementation of every kernel the engine calls. Outputs are new tensors unless stated otherwise."""

    name: str
    has_latent_attention = False
    has_attention_peaks = False
    has_correction = False

    @abstractmethod
    def prefill_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """Attention of scattered rows over the paged pool, causal by position. q: [num_rows, num_heads, head_dim].
        Returns the same shape in q's dtype, accumulated in fp32."""

    @abstractmethod
    def decode_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """`prefill_attention` of one row per sequence, at the last position of the sequence.

        q: [num_seqs, num_heads, head_dim], row i belongs to sequence i. Only the block table and the lengths of meta
        are read, on the device; positions and cu_rows are not.
        """

    def latent_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams, heads: LatentHeads
    ) -> Tensor:
        """Attention of scattered rows over a pool of latents (MLA), causal by position. Decoding too: one row a
        sequence.

        q: [num_rows, num_heads, nope_dim + rope_dim], the last rope_dim channels rotated. cache.k: position keys
        (rotated), one head of rope_dim; cache.v: latents, one head of rank. Returns [num_rows, num_heads, v_dim] in q's
        dtype. Raises KernelError unless the backend `has_latent_attention`.
        """
        raise KernelError(
            f"the {self.name} backend has no attention over latents (MLA): its kernels take K and V of one width",
            "use --attention-backend torch",
        )

    @abstractmethod
    def rope_and_cache(self, q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots) -> Tensor | None:
        """Rotate q and k, write k and v to their slots, return the rotated q. q: [num_rows, num_heads, head_dim] or
        None. The rotation is computed in fp32 and cast once."""

    @abstractmethod
    def load_kv(self, stored: StoredKV, cache: LayerCache, slots: Slots) -> None:
        """Write stored K and V into the pool: dequantise, rotate K to its new positions in fp32, cast, scatter."""

    def load_layers(self, stored: StoredLayers, caches: Sequence[LayerCache], slots: Slots) -> None:
        """`load_kv` of every chunk at every layer. caches: of the adjacent layers, in order, with one shape and dtype;
        slots: of all rows, chunk after chunk, the same at every layer."""
        heads = slice(stored.first_head, stored.first_head + caches[0].k.shape[2])
        firsts = [first for first, *_ in layers_table(stored.chunks)]
        for layer, cache in enumerate(caches):
            for chunk, first in zip(stored.chunks, firsts, strict=True):
                found = {name: t.at(stored.data, layer * chunk.layer_bytes) for name, t in chunk.tensors.items()}
                own = {
                    name: (t[None, heads] if t.dim() == 1 else t[:, heads]).contiguous() for name, t in found.items()
                }
                rows = slice(first, first + chunk.num_rows)
                run = slots.first_slot + first if slots.first_slot >= 0 else -1
                where = Slots(slots.slots[rows], slots.cos[rows], slots.sin[rows], run)
                self.load_kv(StoredKV(**own, k_levels=stored.k_levels, v_levels=stored.v_levels), cache, where)

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [num_rows, heads, head_dim] by cos, sin [num_rows, head_dim] fp32, in fp32, cast to x.dtype."""

    @abstractmethod
    def kv_deviation(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, kind: str = "kv") -> Tensor:
        """Return the squared L2 distance between each row's fresh K, V or both and the contents of its slot, [num_rows]
        fp32.

        k: rotated, as the pool's K is; a rotation preserves distances. slots: [num_rows] int64. kind: "k", "v" or "kv"
        (the sum). CacheBlend (arXiv 2405.16444), section 4.3.
        """

    def attention_peaks(
        self, q: Tensor, positions: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams,
        peaks: Tensor,
    ) -> None:  # fmt: skip
        """Raise `peaks` fp32 to the largest softmax weight that any row and head gives each key of the only sequence,
        causal by position. peaks: at least as long as the sequence.

        q: [num_rows, num_heads, head_dim], rotated; positions: [num_rows] int64, -1 for rows that do not count. Only of
        a backend that `has_attention_peaks`.
        """
        raise KernelError(f"the {self.name} backend has no kernel for attention peaks", "see has_attention_peaks")

    def correct_stale(
        self, k: Tensor, v: Tensor, cache: LayerCache, rows: Regressed, rotation: tuple[Tensor, Tensor],
        prior: RegressionPrior, damped: bool,
    ) -> None:  # fmt: skip
        """Add to the pool what the changes of each chunk's known rows predict for its other rows, in place (Gaussian
        process regression over K before RoPE and V). Known rows get values without meaning.

        k (before RoPE), v: fresh values, [num_fresh, num_kv_heads, head_dim], the known rows' at rows.fresh. rotation:
        cos and sin [num_rows, head_dim] fp32 of `rows`. damped: a V smaller than its chunk's mean moves less. Only of a
        backend that `has_correction`.
        """
        raise KernelError(f"the {self.name} backend has no kernel for the correction", "see has_correction")

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension in fp32, cast back, then times weight. With an fp32 weight it is cast back
        after the multiplication."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). `residual` may be updated in place and returned."""

    @abstractmethod
    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up for gate_up [num_rows, 2 * intermediate]; activation: silu, gelu or
        gelu_pytorch_tanh."""

    def warm_up(self, q: Tensor, cache: LayerCache, params: AttentionParams, max_keys: int) -> None:  # noqa: B027
        """Compile every variant that a layer's attention may launch over contexts of up to max_keys positions.

        q: one row, [1, num_heads, head_dim]; cache: at least one block, which is read and not written. Backends without
        compilation do nothing.
        """
