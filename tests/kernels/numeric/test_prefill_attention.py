"""Scattered-row paged prefill attention against fp64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from cacheblend_kernels import KernelError, LayerCache
from cacheblend_kernels.triton_backend.configs import TileConfig
from cacheblend_kernels.triton_backend.prefill_attention import prefill_attention
from cases import (
    SMALL,
    AttentionCase,
    attention_case,
    attention_reference,
    check_attention,
    run_attention,
    scattered,
)

run, check = partial(run_attention, prefill_attention), partial(check_attention, prefill_attention)
COPIED = TileConfig(16, 16, 4, 2, tma=True)


def over(case: AttentionCase, pool: torch.Tensor) -> AttentionCase:
    """The case over another pool."""
    return replace(case, cache=LayerCache(pool, pool))


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((2, 2), torch.float32),
        ((4, 2), torch.bfloat16),
        ((7, 1), torch.float32),
        ((12, 2), torch.float16),
        ((16, 1), torch.bfloat16),
    ],
)
def test_group_sizes(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(attention_case([scattered(9, 50)], [50], heads=heads, dtype=dtype, head_dim=32), device)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_dims(head_dim: int, device: torch.device) -> None:
    check(attention_case([scattered(7, 40)], [40], head_dim=head_dim, dtype=torch.float16), device)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
@pytest.mark.parametrize("contiguous", [False, True])
def test_block_sizes(block_size: int, contiguous: bool, device: torch.device) -> None:
    case = attention_case([scattered(10, 70)], [70], block_size=block_size, contiguous=contiguous, head_dim=32)
    check(case, device)


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (1, 4), (5, 1), (16, 1), (16, 4), (33, 1), (33, 4), (1000, 1)])
def test_sliding_window(window: int, splits: int, device: torch.device) -> None:
    check(attention_case([scattered(12, 90)], [90], head_dim=32), device, sliding_window=window, num_splits=splits)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("window", [None, 20])
def test_soft_cap(soft_cap: float, window: int | None, device: torch.device) -> None:
    case = attention_case([scattered(12, 90)], [90], head_dim=32)
    check(case, device, soft_cap=soft_cap, sliding_window=window)


@pytest.mark.parametrize(
    ("splits", "window", "dtype", "config"),
    [(1, None, torch.float32, SMALL), (4, None, torch.float32, SMALL), (4, 20, torch.float32, SMALL),
     (1, None, torch.float16, COPIED)],
)  # fmt: skip
def test_sinks(splits: int, window: int | None, dtype: torch.dtype, config: TileConfig, device: torch.device) -> None:
    sinks = torch.tensor([-3.0, 0.5, 2.0, 9.0])
    case = attention_case([scattered(12, 90), [0, 1, 40]], [90, 41], heads=(4, 2), head_dim=32, dtype=dtype)
    check(case, device, num_splits=splits, sliding_window=window, sinks=sinks, config=config)


@pytest.mark.parametrize("splits", [1, 4])
def test_several_sequences_ragged_empty_and_single(splits: int, device: torch.device) -> None:
    positions = [[0], scattered(21, 60), [], [34], list(range(17)), scattered(3, 33)]
    case = attention_case(positions, [1, 75, 5, 35, 17, 40], heads=(2, 1), head_dim=32)
    check(case, device, num_splits=splits)


def test_rows_with_wide_gaps_and_keys_beyond_the_last_row(device: torch.device) -> None:
    check(attention_case([[0, 1, 2, 77, 78, 200]], [260], head_dim=32), device)


def test_full_prefill_is_the_dense_case(device: torch.device) -> None:
    check(attention_case([list(range(40))], [40], contiguous=True, head_dim=32), device)


def test_strided_rows_of_a_fused_projection(device: torch.device) -> None:
    check(attention_case([scattered(9, 30)], [30], strided=True, head_dim=32), device)


def test_tile_wider_than_block_size(device: torch.device) -> None:
    config = TileConfig(32, 64, 4, 2)
    check(attention_case([scattered(20, 150)], [150], block_size=16, head_dim=32), device, config=config)


@pytest.mark.parametrize(
    ("last", "dtype"), [(n, torch.float16) for n in (15, 16, 31, 32, 48, 63)] + [(100, torch.bfloat16)]
)
def test_copied_tiles(last: int, dtype: torch.dtype, device: torch.device) -> None:
    """Whole pairs of tiles, an odd one out, none at all: rows at and around each edge of a tile."""
    positions = sorted({max(0, last - 1), last, last + 1})
    check(attention_case([positions], [last + 5], head_dim=32, dtype=dtype), device, config=COPIED)


@pytest.mark.parametrize(
    ("block_size", "contiguous", "splits"), [(16, False, 1), (32, False, 4), (64, False, 1), (64, True, 4)]
)
def test_copied_tiles_of_blocks(block_size: int, contiguous: bool, splits: int, device: torch.device) -> None:
    case = attention_case(
        [scattered(12, 150)], [160], head_dim=32, block_size=block_size, contiguous=contiguous, dtype=torch.float16
    )
    check(case, device, config=COPIED, num_splits=splits)


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (40, 5.0), (100, None), (None, 5.0)])
def test_copied_tiles_under_window_and_soft_cap(
    window: int | None, soft_cap: float | None, device: torch.device
) -> None:
    positions = [list(range(110, 116)), [], [3], scattered(5, 90)]
    case = attention_case(positions, [120, 7, 4, 90], heads=(6, 2), head_dim=32, dtype=torch.float16)
    check(case, device, config=COPIED, sliding_window=window, soft_cap=soft_cap)


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 16), (32, 8)])
def test_tiles_that_are_no_boxes_are_not_copied(head_dim: int, block_size: int, device: torch.device) -> None:
    case = attention_case([scattered(9, 90)], [90], head_dim=head_dim, block_size=block_size, dtype=torch.float16)
    check(case, device, config=COPIED)


def test_heuristic_choice(device: torch.device) -> None:
    check(attention_case([scattered(6, 600)], [600], head_dim=64, dtype=torch.float16), device, config=None)


@pytest.mark.parametrize("window", [None, 20])
def test_float8_pool(window: int | None, device: torch.device) -> None:
    case = attention_case([scattered(9, 50)], [50], head_dim=32, dtype=torch.float32)
    scales = torch.tensor([0.02, 0.5])
    check(case.in_float8(scales, 2 * scales), device, sliding_window=window)


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    case = attention_case([scattered(9, 50)], [50], head_dim=32)
    case = replace(case, q=case.q * 300)
    want = attention_reference(case, 32**-0.5)
    torch.testing.assert_close(run(case, device).cpu().double(), want, atol=2e-3, rtol=2e-3)


def test_no_rows(device: torch.device) -> None:
    case = attention_case([[3]], [4], head_dim=32)
    meta = attention_case([[]], [4], head_dim=32).meta
    assert run(replace(case, q=case.q[:0], meta=meta), device).shape == (0, 4, 32)


def test_refusals(device: torch.device) -> None:
    good = attention_case([scattered(4, 20)], [20], head_dim=32)
    odd, wide = torch.zeros(4, 12, 2, 32), torch.zeros(4, 16, 2, 64)
    with pytest.raises(KernelError, match="12"):
        run(over(good, odd), device)
    with pytest.raises(KernelError, match="head_dim"):
        run(over(good, wide), device)
    with pytest.raises(KernelError, match="float16"):
        run(replace(good, q=good.q.half()), device)
    with pytest.raises(KernelError, match="3"):
        run(replace(good, q=good.q[:, :3].contiguous()), device)
    with pytest.raises(KernelError, match="q"):
        run(replace(good, q=good.q.transpose(1, 2).contiguous().transpose(1, 2)), device)
    with pytest.raises(KernelError, match="sliding window"):
        run(good, device, sliding_window=0)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(60))
def test_sweep(seed: int, device: torch.device) -> None:
    gen = torch.Generator().manual_seed(seed)

    def pick(*options: object) -> object:
        return options[int(torch.randint(len(options), (1,), generator=gen))]

    kv_lens = [int(n) for n in torch.randint(1, 160, (int(pick(1, 1, 2, 4)),), generator=gen)]  # type: ignore[call-overload]
    positions = [scattered(min(n, int(pick(1, 5, 30, 90))), n, seed) for n in kv_lens]  # type: ignore[call-overload]
    case = attention_case(
        positions,
        kv_lens,
        heads=pick((2, 2), (4, 2), (6, 2), (14, 2), (5, 1)),  # type: ignore[arg-type]
        head_dim=pick(32, 64, 80, 128),  # type: ignore[arg-type]
        block_size=pick(1, 8, 16, 64),  # type: ignore[arg-type]
        dtype=pick(torch.float32, torch.float16, torch.bfloat16),  # type: ignore[arg-type]
        contiguous=len(kv_lens) == 1 and bool(pick(False, True)),
        seed=seed,
    )
    check(
        case,
        device,
        config=pick(SMALL, COPIED, TileConfig(32, 32, 4, 2), TileConfig(16, 64, 4, 2, tma=True), None),
        num_splits=pick(None, 1, 2, 8),
        sliding_window=pick(None, None, 3, 40),
        soft_cap=pick(None, None, 8.0),
    )
