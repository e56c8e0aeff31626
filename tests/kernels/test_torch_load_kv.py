"""Stored K and V into the pool by the torch backend, on CPU: every form, whole and short groups, tables of either kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cacheblend_kernels import KernelError, compiled_load
from cacheblend_kernels.torch_backend import BLOCK_VALUES, TorchBackend
from kernel_references import CODECS, decoded, stored_kv

GROUP = 4


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim"), [(1, 2, 64), (3, 1, 16), (9, 2, 64), (5, 3, 80), (BLOCK_VALUES // 128 + 6, 2, 64)]
)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_load_kv(
    form: str,
    num_rows: int,
    heads: int,
    dim: int,
    wide: bool,
    run: bool,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(compiled_load, "compiled_function", lambda: None)
    elif compiled_load.compiled_function() is None:
        pytest.skip("the package was installed without a C compiler")
    torch.manual_seed(0)
    backend = TorchBackend()
    tensors = stored_kv(form, num_rows, heads, dim, torch.device("cpu"), group_size=GROUP, nan=True)
    k_value, v_value = decoded(tensors, dim, GROUP)
    angle = torch.randn(num_rows, dim // 2)
    cos, sin = (torch.cat((t, t), 1) for t in (angle.cos(), angle.sin()))
    tables = backend.rope_tables(cos, sin, heads) if wide else (cos, sin)
    num_slots = -(-num_rows // 8) * 8 + 16
    slots = torch.arange(11, 11 + num_rows) if run else torch.randperm(num_slots)[:num_rows]
    caches = [torch.full((num_slots // 8, 8, heads, dim), 7.0) for _ in range(2)]
    k, v = tensors.pop("k"), tensors.pop("v")
    load, done = compiled_load.load_kv, []
    monkeypatch.setattr(compiled_load, "load_kv", lambda *given: done.append(load(*given)) or done[-1])
    backend.load_kv(k, v, *tables, *caches, slots, first_slot=11 if run else -1, group_size=GROUP, **tensors)
    assert done == [compiled]
    low, high = k_value.chunk(2, -1)
    c, s = angle.double().cos()[:, None], angle.double().sin()[:, None]
    rotated = torch.cat((low * c - high * s, high * c + low * s), -1)
    untouched = torch.ones(num_slots, dtype=torch.bool)
    untouched[slots] = False
    for cache, wanted in zip(caches, (rotated, v_value), strict=True):
        flat = cache.view(num_slots, heads, dim).double()
        torch.testing.assert_close(flat[slots], wanted, atol=1e-4, rtol=1e-5, equal_nan=True)
        assert (flat[untouched] == 7.0).all()


class TestCompiled:
    """What it takes, and that it writes nowhere else."""

    @pytest.fixture(autouse=True)
    def _built(self) -> None:
        if compiled_load.compiled_function() is None:
            pytest.skip("the package was installed without a C compiler")

    @staticmethod
    def _load(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, first_slot: int = -1, **scales: Any) -> bool:
        table = torch.ones(k.shape[0], cache.shape[-1])
        given = [scales.get(name) for name in ("k_scale", "k_zero", "v_scale", "v_zero")]
        return compiled_load.load_kv(k, k, table, table, cache, cache.clone(), slots, first_slot, given, GROUP)

    def test_it_takes_what_is_stored(self) -> None:
        k, cache = torch.ones(3, 2, 16), torch.zeros(2, 4, 2, 16)
        assert self._load(k, cache, torch.tensor([7, 0, 3]))
        assert self._load(k, cache, torch.tensor([]), first_slot=5)

    @pytest.mark.parametrize("slots", [[0, 1, 8], [-1, 0, 1]])
    def test_no_slot_beyond_the_pool(self, slots: list[int]) -> None:
        k, cache = torch.ones(3, 2, 16), torch.zeros(2, 4, 2, 16)
        with pytest.raises(KernelError, match="slots"):
            self._load(k, cache, torch.tensor(slots))
        with pytest.raises(KernelError, match="slots"):
            self._load(k, cache, torch.tensor([]), first_slot=6)
        assert (cache == 0).all()

    @pytest.mark.parametrize(
        ("k", "cache", "slots"),
        [
            (torch.ones(3, 2, 16).double(), torch.zeros(2, 4, 2, 16), torch.arange(3)),
            (torch.ones(3, 2, 16), torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16), torch.arange(3)),
            (torch.ones(3, 2, 16), torch.zeros(2, 4, 3, 16), torch.arange(3)),
            (torch.ones(3, 2, 16), torch.zeros(2, 4, 2, 8), torch.arange(3)),
            (torch.ones(3, 2, 16), torch.zeros(2, 4, 2, 16), torch.arange(3, dtype=torch.int32)),
            (torch.ones(3, 2, 16), torch.zeros(2, 4, 2, 16), torch.arange(4)),
            (torch.ones(3, 16, 2).transpose(1, 2), torch.zeros(2, 4, 2, 16), torch.arange(3)),
            (torch.ones(3, 2, 16), torch.zeros(4, 2, 2, 16).transpose(0, 1), torch.arange(3)),
            (torch.frombuffer(bytearray(4 * 96 + 2), dtype=torch.float32, offset=2).view(3, 2, 16), torch.zeros(2, 4, 2, 16), torch.arange(3)),
            (torch.ones(3, 2, 16, dtype=torch.uint8), torch.zeros(2, 4, 2, 16), torch.arange(3)),
            (torch.ones(3, 2, 16).to(torch.float8_e4m3fn), torch.zeros(2, 4, 2, 16), torch.arange(3)),
            (torch.ones(1, 1, 2048), torch.zeros(1, 4, 1, 2048), torch.arange(1)),
            (torch.ones(3, 2, 15), torch.zeros(2, 4, 2, 15), torch.arange(3)),
        ],
        ids=[
            "dtype", "pool dtype", "heads", "head_dim", "int32 slots", "slots", "strided k", "strided pool", "unaligned",
            "no scales", "no float8 scales", "wide heads", "odd heads",
        ],
    )  # fmt: skip
    def test_torch_does_the_rest(self, k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        assert not self._load(k, cache, slots)
        assert (cache == 0).all()

    def test_another_version_is_not_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled_load.ctypes, "CDLL", lambda name: object())
        assert compiled_load.compiled_function.__wrapped__() is None
