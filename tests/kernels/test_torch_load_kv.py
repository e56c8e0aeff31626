"""Stored K and V into the pool by the torch backend, on CPU: every form, runs and scattered slots."""

from __future__ import annotations

import platform
from dataclasses import replace
from itertools import product

import pytest
import torch
from cacheblend_kernels import KernelError, LayerCache, Slots, compiled
from cacheblend_kernels.interface import packed_bytes
from cacheblend_kernels.torch_backend import TorchBackend
from cases import rope_tables
from kernel_references import CODECS, decoded, rope_reference, stored_kv


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim"),
    [(1, 2, 64), (3, 1, 16), (9, 2, 64), (5, 3, 80), (4, 2, 96), (3, 1, 20), (2, 2, 256), (1030, 2, 64)],
)
@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize(
    ("pool_dtype", "compiled_code"),
    [
        (torch.float32, "_cpu"),
        (torch.bfloat16, "_cpu_avx2"),
        (torch.float16, None),
        pytest.param(torch.bfloat16, "_cpu", marks=pytest.mark.torture),
        pytest.param(torch.float32, "_cpu_avx2", marks=pytest.mark.torture),
        pytest.param(torch.float32, None, marks=pytest.mark.torture),
    ],
)
def test_load_kv(
    form: str,
    num_rows: int,
    heads: int,
    dim: int,
    run: bool,
    pool_dtype: torch.dtype,
    compiled_code: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the compiled code of each width, and without any."""
    if compiled_code == "_cpu_avx2" and platform.machine() != "x86_64":
        pytest.skip("AVX2 is x86's")
    code = None if compiled_code is None else compiled.loaded(compiled_code)
    assert compiled_code is None or code is not None
    monkeypatch.setattr(compiled, "library", lambda: code)
    torch.manual_seed(0)
    stored = stored_kv(form, num_rows, heads, dim, torch.device("cpu"), nan=True)
    k_value, v_value = decoded(stored, dim)
    cos, sin = rope_tables(num_rows, dim)
    num_slots = -(-num_rows // 8) * 8 + 16
    slots = torch.arange(11, 11 + num_rows) if run else torch.randperm(num_slots)[:num_rows]
    pools = [torch.full((num_slots // 8, 8, heads, dim), 7.0, dtype=pool_dtype) for _ in range(2)]
    TorchBackend().load_kv(stored, LayerCache(*pools), Slots(slots, cos, sin, 11 if run else -1))
    atol, rtol = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1e-2, 2**-7), torch.float16: (1e-2, 2**-9)}[pool_dtype]
    untouched = torch.ones(num_slots, dtype=torch.bool)
    untouched[slots] = False
    for pool, wanted in zip(pools, (rope_reference(k_value, cos, sin), v_value), strict=True):
        flat = pool.view(num_slots, heads, dim).double()
        torch.testing.assert_close(flat[slots], wanted, atol=atol, rtol=rtol, equal_nan=True)
        assert (flat[untouched] == 7.0).all()


def test_codes_go_to_slots_of_the_pool_alone() -> None:
    stored = stored_kv("int7", 4, 2, 32, torch.device("cpu"))
    pools = [torch.zeros(2, 8, 2, 32) for _ in range(2)]
    cos, sin = rope_tables(4, 32)
    for slots, first in ((torch.tensor([0, 1, 2, 16]), -1), (torch.arange(4), 13)):
        with pytest.raises(KernelError, match="slots"):
            TorchBackend().load_kv(stored, LayerCache(*pools), Slots(slots, cos, sin, first))
    assert not any(pool.any() for pool in pools)


def test_codes_of_latents_beside_position_keys() -> None:
    """MLA: K and V of equal bits and different widths; and a V of an odd one, which is not mixed."""
    for v_dim, bits in product((128, 33), (7, 4)):
        one, other = (stored_kv("int7", 5, 1, dim, torch.device("cpu"), seed=1) for dim in (64, v_dim))
        assert one.k_levels is not None
        levels = one.k_levels[: 2**bits]
        codes = (x.k[..., : packed_bytes(dim, bits)].contiguous() for x, dim in ((one, 64), (other, v_dim)))
        stored = replace(one, k_levels=levels, v_levels=levels, **dict(zip("kv", codes, strict=True)))
        pools = [[torch.zeros(1, 8, 1, dim) for dim in (64, v_dim)] for _ in range(2)]
        slots = Slots(torch.arange(5), *rope_tables(5, 64))
        assert compiled.load_codes(stored, LayerCache(*pools[0]), slots) == (compiled.library() is not None)
        TorchBackend._load_kv(stored, LayerCache(*pools[1]), slots)
        for fast, plain in zip(*pools, strict=True):
            assert plain.any()
            if compiled.library() is not None:
                torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
