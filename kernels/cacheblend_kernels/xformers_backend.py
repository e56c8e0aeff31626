"""xformers backend: its attention operators where they support the launch, our Triton kernels everywhere else.

- Decode: `triton_splitk` with a paged bias (block size a multiple of 64, fp16 or bf16; no sliding window, soft cap
  or sinks). It uses Triton's block pointers, which newer Triton releases have removed.
- Full prefill, if the rows are all positions 0..n-1 of one sequence in adjacent blocks: `memory_efficient_attention`.
- Scattered rows: Triton. They fit none of xformers' biases.
- Cache writes, deviation and norms: Triton, since xformers has none.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, KernelError, LayerCache
from cacheblend_kernels.triton_backend.attention_core import most_keys
from cacheblend_kernels.triton_backend.backend import TritonBackend

PAGE = 64
HALVES = (torch.float16, torch.bfloat16)
DECODE_HEAD_DIMS = (16, 32, 64, 128, 256)


def import_xformers() -> Any:
    """Import xformers.ops.fmha without its warning about compiled extensions. Raises KernelError if it fails."""
    logging.getLogger("xformers").setLevel(logging.ERROR)
    try:
        from xformers.ops import fmha
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelError(
            f"xformers does not import: {error}", "install xformers, or use the triton backend"
        ) from error
    return fmha


def has_block_pointers() -> bool:
    """Return whether Triton has block pointers. Releases without them keep the function, which raises."""
    make = getattr(tl, "make_block_ptr", None)
    if make is None:
        return False
    try:
        make.__wrapped__(None, None, None, None, None, None, _semantic=None)
    except NotImplementedError:
        return False
    except Exception:  # the function accepted the call and went on to its arguments
        return True
    return True


class XformersBackend(TritonBackend):
    """Raises KernelError if xformers is missing or has no operator that runs here."""

    name = "xformers"

    def __init__(self, device: torch.device) -> None:
        self._fmha = import_xformers()
        super().__init__(device)
        ops = (self._fmha.flash3, self._fmha.flash, self._fmha.cutlass)
        available = [op.FwOp for op in ops if device.type == "cuda" and op.FwOp.is_available()]
        self._prefill_op = available[0] if available else None
        self._decode_op = self._fmha.triton_splitk.FwOp if has_block_pointers() else None
        if device.type == "cuda" and self._prefill_op is None and self._decode_op is None:
            raise KernelError(
                "xformers has no attention operator that runs here: its prefill operators are not built for this "
                "torch, and its decode operator needs a Triton with block pointers",
                "use --attention-backend triton",
            )
        self._bias: tuple[tuple[object, ...], Any] | None = None
        self._captured: list[Any] = []

    def prefill_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        if self._prefill_op is not None and params.plain and is_full(q, cache, meta):
            first, causal = meta.contiguous_slot, self._fmha.attn_bias.LowerTriangularMask()
            inputs = attention_inputs(self._fmha, q, cache, slice(first, first + len(q)), causal, params.scale)
            if not self._prefill_op.not_supported_reasons(inputs):
                return self._run(self._prefill_op, inputs).reshape(q.shape)
        return super().prefill_attention(q, cache, meta, params)

    def decode_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        taken = (
            self._decode_op is not None and params.plain and q.shape[0] == meta.num_seqs > 0 and takes_decode(q, cache)
        )
        if not taken:
            return super().decode_attention(q, cache, meta, params)
        bias = self._paged_bias(meta, cache.k.shape[1])
        inputs = attention_inputs(self._fmha, q, cache, slice(None), bias, params.scale)
        return self._run(self._decode_op, inputs).reshape(q.shape)

    def _run(self, op: Any, inputs: Any) -> Tensor:
        """Run the operator, which is named because xformers chooses only among those without paged biases."""
        out: Tensor = self._fmha.memory_efficient_attention_forward(
            inputs.query, inputs.key, inputs.value, inputs.attn_bias, scale=inputs.scale, op=op
        )
        return out

    def _paged_bias(self, meta: AttentionMetadata, block_size: int) -> Any:
        """Return the bias over these tensors, reused from layer to layer: building one copies from the host. A captured
        graph reads the bias's own tensors at every replay, so biases used during a capture are kept."""
        table, kv_lens = meta.block_table, meta.kv_lens
        most = most_keys(meta, block_size, None)
        key = (table.data_ptr(), kv_lens.data_ptr(), table.shape, most, block_size)
        if self._bias is None or self._bias[0] != key:
            self._bias = (key, paged_bias(self._fmha, table, kv_lens, most, block_size))
        bias = self._bias[1]
        if capturing(table) and all(kept is not bias for kept in self._captured):
            self._captured.append(bias)
        return bias


def capturing(tensor: Tensor) -> bool:
    """Return whether launches are now recorded in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_full(q: Tensor, cache: LayerCache, meta: AttentionMetadata) -> bool:
    """Return whether the rows are all positions of one sequence in adjacent blocks; decided on the host."""
    whole = meta.contiguous_slot >= 0 and 0 < meta.num_rows == meta.max_kv_len
    return whole and q.dtype in HALVES and q.dtype == cache.k.dtype


def takes_decode(q: Tensor, cache: LayerCache) -> bool:
    """Return whether triton_splitk has a kernel for this shape."""
    fits = cache.k.shape[1] % PAGE == 0 and q.shape[2] in DECODE_HEAD_DIMS
    return fits and q.dtype in HALVES and q.dtype == cache.k.dtype and cache.k.is_contiguous()


def attention_inputs(fmha: Any, q: Tensor, cache: LayerCache, slots: slice, bias: Any, scale: float) -> Any:
    """Return fmha.Inputs, [1, rows or slots, kv heads, group, head_dim], K and V as views of the pool."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    group = num_heads // num_kv_heads
    k, v = (
        pool.view(-1, num_kv_heads, 1, head_dim)[slots].unsqueeze(0).expand(1, -1, num_kv_heads, group, head_dim)
        for pool in (cache.k, cache.v)
    )
    return fmha.Inputs(q.reshape(1, num_rows, num_kv_heads, group, head_dim), k, v, attn_bias=bias, scale=scale)


def paged_bias(fmha: Any, block_table: Tensor, kv_lens: Tensor, most: int, block_size: int) -> Any:
    """Return a paged bias of one query per sequence that reads the lengths from kv_lens on the device. most: upper
    bound of the lengths, used only to choose the number of splits."""
    num_seqs = block_table.shape[0]
    bias = fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [1] * num_seqs, [most] * num_seqs, block_table, block_size, device=block_table.device
    )
    bias.k_seqinfo.seqlen = kv_lens
    return bias
