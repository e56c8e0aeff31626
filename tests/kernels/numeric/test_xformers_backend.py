"""The xformers backend end to end: its operators where it has them here, our kernels for the rest, fp64 beside both."""

from __future__ import annotations

import pytest
import torch
from cases import assert_close, attention_case, attention_reference, scattered

pytest.importorskip("xformers", reason="xformers is not installed")
from cacheblend_kernels import AttentionParams
from cacheblend_kernels import xformers_backend as xb

HALF = torch.float16


@pytest.mark.parametrize("positions", [list(range(70)), scattered(9, 70)])
def test_prefill(positions: list[int], device: torch.device) -> None:
    case = attention_case([positions], [70], heads=(4, 2), block_size=64, dtype=HALF, contiguous=True)
    moved = case.to(device)
    backend = xb.XformersBackend(device)
    out = backend.prefill_attention(moved.q, moved.cache, moved.meta, AttentionParams(0.125))
    assert_close(out, attention_reference(case, 0.125), HALF)


@pytest.mark.parametrize(("block_size", "window"), [(64, None), (16, None), (64, 30)])
def test_decode(block_size: int, window: int | None, device: torch.device) -> None:
    kv_lens = [70, 5, 130]
    case = attention_case([[n - 1] for n in kv_lens], kv_lens, heads=(8, 2), block_size=block_size, dtype=HALF)
    moved = case.to(device)
    backend = xb.XformersBackend(device)
    if device.type == "cpu":  # xformers turns CPU tensors away before it looks for an operator
        backend._decode_op = None
    out = backend.decode_attention(moved.q, moved.cache, moved.meta, AttentionParams(0.125, window))
    assert_close(out, attention_reference(case, 0.125, window), HALF)


@pytest.mark.skipif(not xb.has_block_pointers(), reason="this Triton has no block pointers, which triton_splitk needs")
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 64), ((14, 2), 128), ((2, 2), 64)])
def test_decode_operator(
    heads: tuple[int, int], head_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":  # asked for a tuning constant
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    fmha, kv_lens = xb.import_xformers(), [70, 5, 200]
    case = attention_case(
        [[n - 1] for n in kv_lens], kv_lens, heads=heads, head_dim=head_dim, block_size=64, dtype=HALF
    )
    moved, scale = case.to(device), head_dim**-0.5
    bias = xb.paged_bias(fmha, moved.meta.block_table, moved.meta.kv_lens, 256, 64)
    inputs = xb.attention_inputs(fmha, moved.q, moved.cache, slice(None), bias, scale)
    out, _ = fmha.triton_splitk.FwOp.apply(inputs, needs_gradient=False)
    assert_close(out.reshape(case.q.shape), attention_reference(case, scale), HALF)
