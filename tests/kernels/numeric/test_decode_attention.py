"""Paged decode attention, whole and split, against fp64."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels import KernelError
from cacheblend_kernels.triton_backend.configs import TileConfig
from cacheblend_kernels.triton_backend.decode_attention import decode_attention
from cases import AttentionCase, assert_close, attention_case, attention_reference

SMALL = TileConfig(16, 16, 4, 2)


def decode_case(kv_lens: list[int], **options: object) -> AttentionCase:
    return attention_case([[n - 1] for n in kv_lens], kv_lens, **options)  # type: ignore[arg-type]


def run(case: AttentionCase, device: torch.device, **options: object) -> torch.Tensor:
    m, meta = case.to(device), case.to(device).meta
    options.setdefault("config", SMALL)
    return decode_attention(
        m.q,
        m.k_cache,
        m.v_cache,
        meta.block_table,
        meta.kv_lens,
        scale=case.q.shape[-1] ** -0.5,
        num_sms=132,
        contiguous_slot=meta.contiguous_slot,
        **options,
    )  # type: ignore[arg-type]


def check(case: AttentionCase, device: torch.device, **options: object) -> None:
    window, cap = options.get("sliding_window"), options.get("soft_cap")
    want = attention_reference(case, case.q.shape[-1] ** -0.5, window, cap)  # type: ignore[arg-type]
    assert_close(run(case, device, **options), want, case.q.dtype)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ragged_batch(splits: int, dtype: torch.dtype, device: torch.device) -> None:
    check(decode_case([1, 16, 17, 95], dtype=dtype, head_dim=32), device, num_splits=splits)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (24, 1)])
def test_group_sizes(heads: tuple[int, int], device: torch.device) -> None:
    check(decode_case([40], heads=heads, head_dim=32), device, config=None)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, device: torch.device) -> None:
    check(decode_case([70], head_dim=head_dim, dtype=torch.float16), device, config=None, num_splits=2)


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("contiguous", [False, True])
def test_block_sizes(block_size: int, contiguous: bool, device: torch.device) -> None:
    check(decode_case([50], block_size=block_size, contiguous=contiguous, head_dim=32), device, num_splits=2)


@pytest.mark.parametrize("window", [1, 7, 16, 500])
@pytest.mark.parametrize("splits", [1, 4])
def test_sliding_window(window: int, splits: int, device: torch.device) -> None:
    check(decode_case([90, 20], head_dim=32), device, sliding_window=window, num_splits=splits)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float, device: torch.device) -> None:
    check(decode_case([60], head_dim=32), device, soft_cap=soft_cap, num_splits=2)


def test_split_chosen_by_context(device: torch.device) -> None:
    check(decode_case([1100], heads=(2, 1), block_size=64, head_dim=64), device, config=None, max_kv_len=1100)


def test_more_splits_than_keys(device: torch.device) -> None:
    check(decode_case([3, 40], head_dim=32), device, num_splits=16)


def test_empty_sequence_gets_zeros(device: torch.device) -> None:
    case = decode_case([5, 9], head_dim=32)
    case.meta.kv_lens[0] = 0
    for splits in (1, 4):
        out = run(case, device, num_splits=splits)
        assert (out[0] == 0).all()
        assert not out.isnan().any()


def test_float8_pool(device: torch.device) -> None:
    case = decode_case([30, 50], head_dim=32)
    scales = torch.tensor([0.02, 0.5]), torch.tensor([0.04, 0.1])
    k8, v8 = (
        (c / s[:, None]).to(torch.float8_e4m3fn) for c, s in zip((case.k_cache, case.v_cache), scales, strict=True)
    )
    held = AttentionCase(case.q, *(c.float() * s[:, None] for c, s in zip((k8, v8), scales, strict=True)), case.meta)
    stored = AttentionCase(case.q, k8, v8, case.meta)
    got = run(stored, device, k_scale=scales[0].to(device), v_scale=scales[1].to(device), num_splits=2)
    assert_close(got, attention_reference(held, 32**-0.5), torch.float32)


def test_refusals(device: torch.device) -> None:
    case = decode_case([5, 9], head_dim=32)
    with pytest.raises(KernelError, match="needs k_scale"):
        run(
            AttentionCase(case.q, *(c.to(torch.float8_e4m3fn) for c in (case.k_cache, case.v_cache)), case.meta), device
        )
    m = case.to(device)
    with pytest.raises(KernelError, match="block_table"):
        decode_attention(
            m.q, m.k_cache, m.v_cache, m.meta.block_table.long(), m.meta.kv_lens, scale=1.0, num_sms=1
        )  # fmt: skip
