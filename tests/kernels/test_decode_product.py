"""Products straight from rows of GGUF tensors, by the compiled code of each width, with and without VNNI."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from block_rows import rows_of, table_of_bytes
from cacheblend_kernels import compiled
from cacheblend_kernels.row_table import BLOCKS, RowTable
from gguf import GGMLQuantizationType


@pytest.fixture(autouse=True, params=[("_cpu", True), ("_cpu", False), ("_cpu_avx2", True), ("_cpu_avx2", False)])
def vnni(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    name, vnni = request.param
    if platform.machine() != "x86_64" and (name == "_cpu_avx2" or not vnni):
        pytest.skip("for x86")
    code = compiled.loaded(name)
    assert code is not None
    monkeypatch.setattr(compiled, "library", lambda: code)
    before = torch.get_num_threads()
    yield vnni
    torch.set_num_threads(before)


def whole_rows(num_rows: int, width: int) -> torch.Tensor:
    """Rows that 8 bits hold exactly: whole numbers up to 127, which each run of 32 has, times a power of two."""
    x = torch.randint(-127, 128, (num_rows, width // 32, 32)).float()
    x[..., 5] = 127
    return (x * torch.exp2(torch.randint(-9, 3, (num_rows, width // 32, 1)).float())).view(num_rows, width)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("width", [32, 96, 896, 1536])
def test_a_product_of_few_rows(kind: int, width: int, vnni: bool) -> None:
    values = BLOCKS[kind][2]
    if width % values:
        width = 256 * (1 + width // 256)
    torch.manual_seed(kind)
    num_outputs, bias = 77, torch.randn(77)
    raw, weight = rows_of(kind, num_outputs, width)
    table = replace(table_of_bytes(raw, kind, width), factor=0.5)
    x = whole_rows(17, width)
    out = compiled.decode_product(x, table, bias, vnni=vnni)
    assert out is not None
    exact, sizes = 0.5 * x.double() @ weight.T + bias, x.double().abs() @ weight.abs().T + bias.abs()
    assert ((out - exact).abs() <= 4e-6 * sizes + 1e-30).all()
    x = torch.randn(17, width)
    out = compiled.decode_product(x, table, vnni=vnni)
    assert out is not None
    for num_rows in range(1, 18):
        torch.set_num_threads(1 + num_rows % 2)
        alone = compiled.decode_product(x[num_rows - 1 : num_rows], table, vnni=vnni)
        some = compiled.decode_product(x[:num_rows], table, vnni=vnni)
        assert alone is not None
        assert some is not None
        assert torch.equal(alone[0], out[num_rows - 1])
        assert torch.equal(some, out[:num_rows])
    exact = 0.5 * x.double() @ weight.T
    assert (out - exact).norm() <= (1e-6 if values == 1 else 1e-4) * exact.norm()


def test_threads_and_a_mixed_table_in_bfloat16(vnni: bool) -> None:
    """300 outputs of each kind, in turns: enough for two threads."""
    torch.manual_seed(1)
    parts = [(kind, *rows_of(kind, 300, 512)) for kind in BLOCKS]
    tables = [table_of_bytes(raw, kind, 512) for kind, raw, _ in parts]
    order = torch.randperm(300 * len(parts))
    table = RowTable(
        torch.cat([t.addresses for t in tables])[order], torch.cat([t.kinds for t in tables])[order], 512, tables
    )
    weight, bias = torch.cat([w for *_, w in parts])[order], torch.randn(len(order)).bfloat16()
    x = whole_rows(6, 512).bfloat16()
    torch.set_num_threads(2)
    out = compiled.decode_product(x, table, bias, vnni=vnni)
    assert out is not None
    assert out.dtype == torch.bfloat16
    exact, sizes = x.double() @ weight.T + bias.double(), x.double().abs() @ weight.abs().T
    assert ((out - exact).abs() <= 4e-3 * exact.abs() + 4e-6 * sizes).all()
    torch.set_num_threads(1)
    alone = compiled.decode_product(x[4:5], table, bias, vnni=vnni)
    assert alone is not None
    assert torch.equal(alone[0], out[4])


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.skipif(platform.system() != "Linux", reason="mprotect is called as on Linux")
def test_nothing_outside_a_row_is_read(kind: int, vnni: bool) -> None:
    """Between pages that cannot be read; a width with a short last group where the kind has one."""
    _, size, values = BLOCKS[kind]
    width = 256 if values == 256 else 96 if values == 32 else 37
    raw, weight = rows_of(kind, 1, width)
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 3 * page)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    x = whole_rows(1, width // 32 * 32) if values > 1 else torch.randn(1, width)
    for at in (page, 2 * page - width // values * size):
        memory[at : at + width // values * size] = raw.numpy().tobytes()
        for guard in (0, 2 * page):
            assert libc.mprotect(ctypes.c_void_p(start + guard), ctypes.c_size_t(page), 0) == 0
        table = RowTable(torch.tensor([start + at]), torch.tensor([kind], dtype=torch.uint8), width, memory)
        out, row = compiled.decode_product(x, table, vnni=vnni), compiled.restore_rows(table, torch.tensor([0]))
        for guard in (0, 2 * page):
            assert libc.mprotect(ctypes.c_void_p(start + guard), ctypes.c_size_t(page), 3) == 0
        assert out is not None
        assert row is not None
        assert torch.equal(row[0].double(), weight[0])
        exact = x.double() @ weight.T
        assert (out - exact).abs() <= 4e-6 * (x.double().abs() @ weight.abs().T)


def test_zeros_and_numbers_that_are_none(vnni: bool) -> None:
    raw, _ = rows_of(GGMLQuantizationType.Q4_K, 8, 512)
    table = table_of_bytes(raw, GGMLQuantizationType.Q4_K, 512)
    x = torch.zeros(3, 512)
    x[1, 300] = torch.nan
    x[2] = 1e-38
    out = compiled.decode_product(x, table, vnni=vnni)
    assert out is not None
    assert not out[0].any()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()


def test_products_that_it_does_not_take(vnni: bool) -> None:
    raw, x = torch.zeros(2, 144, dtype=torch.uint8), torch.ones(1, 256)
    table = table_of_bytes(raw, GGMLQuantizationType.Q4_K, 256)
    assert compiled.decode_product(x.half(), table) is None
    assert compiled.decode_product(x[:, :128], table) is None
    assert compiled.decode_product(x[0], table) is None
    assert compiled.decode_product(x, table, torch.ones(3)) is None
    assert compiled.decode_product(x, table_of_bytes(raw, GGMLQuantizationType.TQ2_0, 256)) is None
    assert compiled.decode_product(x[:, :128], table_of_bytes(raw, GGMLQuantizationType.Q4_K, 128)) is None
    none = compiled.decode_product(x[:0], table)
    assert none is not None
    assert none.shape == (0, 2)
