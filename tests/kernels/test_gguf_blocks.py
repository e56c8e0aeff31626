"""Rows of GGUF tensors by the compiled code of each width: the gguf package's numbers, to the bit."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from block_rows import table_of_bytes
from cacheblend_kernels import KernelError, compiled
from cacheblend_kernels.row_table import BLOCKS
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize


@pytest.fixture(autouse=True, params=["_cpu", "_cpu_avx2"])
def _each_width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "_cpu_avx2" and platform.machine() != "x86_64":
        pytest.skip("AVX2 is x86's")
    code = compiled.loaded(request.param)
    assert code is not None
    monkeypatch.setattr(compiled, "library", lambda: code)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("num_rows", "blocks"), [(1, 1), (7, 3), (300, 9)])
def test_rows_are_restored(kind: int, num_rows: int, blocks: int) -> None:
    """Of random bytes, infinite scales and NaNs among them; with one thread and with several."""
    of_kind = GGMLQuantizationType(kind)
    values, size = GGML_QUANT_SIZES[of_kind]
    assert BLOCKS[kind] == (of_kind.name, size, values)
    raw = np.random.default_rng(kind).integers(0, 256, (num_rows, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(dequantize(raw, of_kind))
    table = table_of_bytes(torch.from_numpy(raw), kind, blocks * values)
    found = compiled.restore_rows(table, torch.arange(num_rows))
    assert found is not None
    assert found.shape == wanted.shape == (num_rows, blocks * values)
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(found.view(torch.int32)[numbers], wanted.view(torch.int32)[numbers])  # signs of zeros, too
    some = torch.tensor([num_rows - 1, 0, num_rows // 2])
    rounded = compiled.restore_rows(table, some, torch.bfloat16)
    assert rounded is not None
    assert torch.equal(rounded.nan_to_num(7.0), wanted.bfloat16()[some].nan_to_num(7.0))


def test_scratch_is_used_if_it_is_large_enough() -> None:
    table, scratch = table_of_bytes(torch.zeros(2, 34, dtype=torch.uint8), 8, 32), torch.ones(64)
    found = compiled.restore_rows(table, torch.arange(2), out=scratch)
    assert found is not None
    assert found.data_ptr() == scratch.data_ptr()
    assert not scratch.any()
    found = compiled.restore_rows(table, torch.arange(2), out=scratch[:63])
    assert found is not None
    assert found.data_ptr() != scratch.data_ptr()


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_the_table(index: int) -> None:
    table = table_of_bytes(torch.zeros(2, 34, dtype=torch.uint8), 8, 32)
    with pytest.raises(KernelError):
        compiled.restore_rows(table, torch.tensor([0, index]))


def test_other_kinds_and_parts_of_blocks_are_left_to_the_package() -> None:
    raw, first = torch.zeros(2, 144, dtype=torch.uint8), torch.arange(1)
    assert compiled.restore_rows(table_of_bytes(raw, GGMLQuantizationType.TQ2_0, 256), first) is None
    assert compiled.restore_rows(table_of_bytes(raw, GGMLQuantizationType.Q4_K, 128), first) is None
    assert compiled.restore_rows(table_of_bytes(raw, GGMLQuantizationType.Q8_0, 48), first) is None
    assert compiled.restore_rows(table_of_bytes(raw, GGMLQuantizationType.Q4_K, 256), first, torch.float16) is None
