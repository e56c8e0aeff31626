"""Blocks of GGUF files by the compiled code of each width: the gguf package's numbers, to the bit."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from cacheblend_kernels import compiled
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize


@pytest.mark.parametrize("kind", compiled.GGUF_BLOCKS)
@pytest.mark.parametrize("library", ["_cpu", "_cpu_avx2"])
@pytest.mark.parametrize(("num_rows", "blocks"), [(1, 1), (7, 3), (300, 9)])
def test_blocks_are_restored(
    kind: int, library: str, num_rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random bytes, infinite scales and NaNs among them; with one thread and with several."""
    if library == "_cpu_avx2" and platform.machine() != "x86_64":
        pytest.skip("AVX2 is x86's")
    code, of_kind = compiled.loaded(library), GGMLQuantizationType(kind)
    assert code is not None
    monkeypatch.setattr(compiled, "library", lambda: code)
    values, size = GGML_QUANT_SIZES[of_kind]
    assert compiled.GGUF_BLOCKS[kind] == (size, values)
    raw = np.random.default_rng(kind).integers(0, 256, (num_rows, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(dequantize(raw, of_kind))
    found = compiled.gguf_blocks(torch.from_numpy(raw), kind)
    assert found is not None
    assert found.shape == wanted.shape == (num_rows, blocks * values)
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(found.view(torch.int32)[numbers], wanted.view(torch.int32)[numbers])  # signs of zeros, too


def test_other_kinds_and_parts_of_blocks_are_left_to_the_package() -> None:
    raw = torch.zeros(2, 34, dtype=torch.uint8)
    assert compiled.gguf_blocks(raw, GGMLQuantizationType.TQ2_0) is None
    assert compiled.gguf_blocks(raw[:, :33].contiguous(), GGMLQuantizationType.Q8_0) is None
    assert compiled.gguf_blocks(raw[:, ::2], GGMLQuantizationType.Q8_0) is None
