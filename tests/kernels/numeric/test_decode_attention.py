"""Paged decode attention, whole and split, against fp64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from cacheblend_kernels import KernelError, LayerCache
from cacheblend_kernels.triton_backend.decode_attention import decode_attention
from cases import (
    AttentionCase,
    attention_case,
    check_attention,
    run_attention,
)

run, check = partial(run_attention, decode_attention), partial(check_attention, decode_attention)


def decode_case(kv_lens: list[int], **options: object) -> AttentionCase:
    return attention_case([[n - 1] for n in kv_lens], kv_lens, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("splits", "dtype"),
    [(1, torch.float32), (2, torch.float16), (8, torch.float32), (8, torch.bfloat16)],
)
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


SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0])


@pytest.mark.parametrize(
    ("splits", "window", "soft_cap"), [(1, None, None), (4, None, None), (8, 20, None), (1, None, 2.0)]
)
def test_sinks(splits: int, window: int | None, soft_cap: float | None, device: torch.device) -> None:
    case = decode_case([90, 3, 1], heads=(4, 2), head_dim=32)
    check(case, device, num_splits=splits, sliding_window=window, soft_cap=soft_cap, sinks=SINKS)


def test_refused_sinks(device: torch.device) -> None:
    with pytest.raises(KernelError, match="sinks"):
        run(decode_case([5], heads=(4, 2), head_dim=32), device, sinks=SINKS[:3])


def test_split_chosen_by_context(device: torch.device) -> None:
    check(decode_case([1100], heads=(2, 1), block_size=64, head_dim=64), device, config=None)


def test_more_splits_than_keys(device: torch.device) -> None:
    check(decode_case([3, 40], head_dim=32), device, num_splits=16)


def test_empty_sequence_gets_zeros(device: torch.device) -> None:
    case = decode_case([5, 9], head_dim=32)
    case.meta.kv_lens[0] = 0
    for splits in (1, 4):
        out = run(case, device, num_splits=splits)
        assert (out[0] == 0).all()
        assert not out.isnan().any()
        assert (run(case, device, num_splits=splits, sinks=torch.zeros(4))[0] == 0).all()


def test_float8_pool(device: torch.device) -> None:
    case = decode_case([30, 50], head_dim=32)
    check(case.in_float8(torch.tensor([0.02, 0.5]), torch.tensor([0.04, 0.1])), device, num_splits=2)


def test_refusals(device: torch.device) -> None:
    case = decode_case([5, 9], head_dim=32)
    with pytest.raises(KernelError, match="k_scale"):
        run(
            replace(case, cache=LayerCache(*(pool.to(torch.float8_e4m3fn) for pool in (case.cache.k, case.cache.v)))),
            device,
        )
    with pytest.raises(KernelError, match="block_table"):
        run(replace(case, meta=replace(case.meta, block_table=case.meta.block_table.long())), device)
    with pytest.raises(KernelError, match="2 sequences"):
        run(replace(case, q=case.q[:1]), device)
