"""Kernels compiled for GPUs that are not here: no register spills, no more shared memory than a block may use.

A subset of a bf16 model with heads of 128 (`core`), of other architectures the largest tiles;
benchmarks/gpu/resources.py compiles every variant.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from cacheblend_kernels import KernelError
from cacheblend_kernels.triton_backend.configs import (
    TileConfig,
    arch_of,
    num_context_splits,
    num_tiles,
    pick_prefill_config,
    prefill_configs,
)
from kernel_compile import SHARED_MEMORY, compile_variant
from kernel_variants import KernelVariant, all_variants

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

ATTENTION = ("prefill_attention", "decode_attention")
CORE = [
    pytest.param(arch, variant, id=f"sm_{arch} {variant.name}")
    for arch in SHARED_MEMORY
    for variant in all_variants(arch)
    if variant.core and (arch == 90 or (variant.family in ATTENTION and variant.constants["BLOCK_M"] >= 128))
]


@pytest.mark.parametrize(("arch", "variant"), CORE)
def test_no_spills_and_it_fits(arch: int, variant: KernelVariant) -> None:
    found = compile_variant(variant, arch)
    assert found.spill_bytes == 0
    assert found.fits
    if variant.family == "prefill_attention" and variant.constants["BLOCK_M"] >= 128:
        assert found.matrix == {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}[arch]


def test_a_kernel_that_takes_too_much_is_found() -> None:
    """The instrument: a tile no multiprocessor holds."""
    from dataclasses import replace

    wide = next(v for v in all_variants(90) if v.core and v.family == "decode_attention")
    found = compile_variant(replace(wide, constants={**wide.constants, "BLOCK_N": 256}, num_stages=5), 90)
    assert not found.fits


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tile_a_launch_may_pick_is_among_the_compiled(arch: int, head_dim: int, dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    compiled = {
        (v.constants["BLOCK_M"], v.constants["BLOCK_N"], v.num_warps)
        for v in all_variants(arch)
        if v.family == "prefill_attention" and v.dtype == name and v.constants["HEAD_DIM"] == head_dim
    }
    configs = prefill_configs(arch, head_dim, dtype.itemsize)
    for group in (1, 4, 7, 8, 16):
        for num_rows in (1, 5, 64, 700, 16384):
            for num_kv_heads in (1, 8, 32):
                picked = pick_prefill_config(configs, group, num_rows, num_kv_heads, 132, 4096)
                assert picked.block_m >= group
                assert (picked.block_m, picked.block_n, picked.num_warps) in compiled


@pytest.mark.parametrize(
    ("arch", "head_dim", "element_size", "group", "most"),
    [(90, 128, 4, 48, 32), (90, 64, 4, 71, 32), (80, 256, 2, 96, 64)],
)
def test_a_group_that_no_tile_holds_is_named(
    arch: int, head_dim: int, element_size: int, group: int, most: int
) -> None:
    configs = prefill_configs(arch, head_dim, element_size)
    with pytest.raises(KernelError, match=f"{group} heads share a KV head; .* at most {most} "):
        pick_prefill_config(configs, group, 700, 1, 132, 4096)
    assert pick_prefill_config(configs, most, 700, 1, 132, 4096).block_m >= most


def test_every_gpu_has_tiles_that_fit_it() -> None:
    found = {c: arch_of(c) for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))}
    assert [c for c, arch in found.items() if arch == 90] == [(9, 0)]
    assert [c for c, arch in found.items() if arch == 100] == [(10, 0), (10, 3)]
    assert SHARED_MEMORY[80] == 99 * 1024  # of 8.6, 8.9 and 12.x
    assert not any(config.tma for config in prefill_configs(80, 128, 2))


def test_wide_tiles_for_many_rows_narrow_ones_for_few() -> None:
    configs = prefill_configs(90, 128, 2)
    assert pick_prefill_config(configs, 4, 16384, 8, 132, 16384).block_m == 128
    assert pick_prefill_config(configs, 4, 1, 8, 132, 16384).block_m == 16
    assert TileConfig(128, 64, 8, 3, tma=True) in configs


def test_a_long_context_is_split_before_tiles_are_narrow() -> None:
    """64 rows over 4,096 keys: 17 narrow tiles would each read every key of a head, 3 wide ones in parts fill the
    device too."""
    configs = prefill_configs(90, 128, 2)
    assert pick_prefill_config(configs, 4, 64, 8, 132, 4096).block_m == 128
    assert num_context_splits(num_tiles(configs[0], 4, 64, 1) * 8, 4096, 132) == 8
    assert pick_prefill_config(configs, 4, 64, 8, 132, 256).block_m == 16  # too short to split


def test_the_context_is_split_where_the_batch_leaves_the_device_idle() -> None:
    assert num_context_splits(8, 16384, 132) == 32  # one sequence of 8 KV heads
    assert num_context_splits(8, 400, 132) == 1  # too short to be worth a second kernel
    assert num_context_splits(132, 16384, 132) == 1  # a batch that fills the device
    splits = [num_context_splits(8, n, 132) for n in (512, 1024, 4096, 16384, 1 << 20)]
    assert splits == sorted(splits)
    assert splits[-1] <= 64


def test_an_unknown_family_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is compiled."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    resources = importlib.import_module("gpu.resources")
    monkeypatch.setattr(sys, "argv", ["resources.py", "--family", "attention"])
    with pytest.raises(SystemExit, match="2"):
        resources.main()
    assert "invalid choice: 'attention'" in capsys.readouterr().err
