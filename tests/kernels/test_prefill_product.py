"""Products of many rows with weights in the types of their file, by the compiled code of each width, in each way."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from block_rows import SCALES_AT, rows_of, table_of_bytes
from cacheblend_kernels import compiled
from cacheblend_kernels.row_table import BLOCKS, RowTable

WAYS = {0: "floats", 1: "pairs", 2: "matrices", 3: "integers", 4: "integers by VNNI"}
BFLOAT16, INTEGERS = (1, 2), (3, 4)
CODES = [kind for kind, (_, _, values) in BLOCKS.items() if values > 1]


@pytest.fixture(
    autouse=True,
    params=[
        *((name, way) for name in ("_cpu", "_cpu_avx2") for way in (0, 4)),
        ("_cpu", 1),
        ("_cpu", 2),
        ("_cpu_avx2", 3),
    ],
    ids=lambda param: f"{param[0]}-{WAYS[param[1]]}",
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    name, way = request.param
    if platform.machine() != "x86_64" and (name == "_cpu_avx2" or way):
        pytest.skip("for x86")
    code = compiled.loaded(name)
    assert code is not None
    monkeypatch.setattr(compiled, "library", lambda: code)
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    if compiled.prefill_product(x, RowTable.of(x), way=way) is None:
        pytest.skip(f"this CPU does not multiply {WAYS[way]}")
    before = torch.get_num_threads()
    yield way
    torch.set_num_threads(before)


def product(x: torch.Tensor, table: RowTable, bias: torch.Tensor | None, way: int) -> torch.Tensor:
    out = compiled.prefill_product(x, table, bias, way)
    assert out is not None
    return out


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("num_outputs", "width"), [(5, 32), (77, 96), (200, 896), (100, 1536)])
def test_a_product_is_the_exact_one(kind: int, num_outputs: int, width: int, way: int) -> None:
    if width % BLOCKS[kind][2]:
        width = 256 * (1 + width // 256)
    torch.manual_seed(kind)
    dtype = torch.bfloat16 if way in BFLOAT16 else torch.float32
    raw, weight = rows_of(kind, num_outputs, width)
    table = replace(table_of_bytes(raw, kind, width), factor=0.5)
    x, bias = torch.randn(70, width).to(dtype), torch.randn(num_outputs).to(dtype)
    out = product(x, table, bias, way)
    right = weight.to(torch.bfloat16).double() if way in BFLOAT16 else weight
    exact, sizes = 0.5 * x.double() @ right.T + bias, x.double().abs() @ right.abs().T + bias.abs()
    most = 4e-3 * exact.abs() if way in BFLOAT16 else 0.5 * rounding(x) @ right.abs().T if way in INTEGERS else 0
    assert out.dtype == dtype
    assert ((out - exact).abs() <= 3e-6 * sizes + most + 1e-30).all()


def rounding(x: torch.Tensor) -> torch.Tensor:
    """Half a step of 15 bits for each value, with a scale for 128 values."""
    spans = [part.abs().amax(1, keepdim=True).expand_as(part) for part in x.double().split(128, 1)]
    return torch.cat(spans, 1) / 16383 / 2


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("byte", [0x00, 0x20, 0x7F, 0x80, 0xFF])
def test_the_largest_sums_have_room(kind: int, byte: int, way: int) -> None:
    """Every product of the largest size and of one sign."""
    raw, _ = rows_of(kind, 2, 512)
    scales = {at + i for at in ([0] if kind == 39 else SCALES_AT.get(kind, (0, 1))) for i in range(2)}
    blocks = raw.view(2, -1, BLOCKS[kind][1])
    for i in set(range(blocks.shape[2])) - scales:
        blocks[..., i] = byte
    table = table_of_bytes(raw, kind, 512)
    weight = compiled.restore_rows(table, torch.arange(2))
    assert weight is not None
    x = weight.sign().to(torch.bfloat16 if way in BFLOAT16 else torch.float32)
    exact = x.double() @ weight.double().T
    assert ((product(x, table, None, way) - exact).abs() <= 1e-2 * (x.double().abs() @ weight.double().abs().T)).all()


@pytest.mark.parametrize("kind", [0, 8, 12, 14])
def test_a_row_is_the_same_among_any_others(kind: int, way: int) -> None:
    raw, _ = rows_of(kind, 210, 768)
    table = table_of_bytes(raw, kind, 768)
    x = torch.randn(1100, 768).to(torch.bfloat16 if way in BFLOAT16 else torch.float32)
    out = product(x, table, None, way)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 7, 16, 17, 33, 600):
            assert torch.equal(product(x[-count:], table, None, way), out[-count:])


def test_rows_of_several_kinds(way: int) -> None:
    parts = [(kind, *rows_of(kind, 30, 512)) for kind in BLOCKS]
    table = RowTable.cat([table_of_bytes(raw, kind, 512) for kind, raw, _ in parts])
    order = torch.randperm(len(table))
    x = torch.randn(9, 512).to(torch.bfloat16 if way in BFLOAT16 else torch.float32)
    out = torch.cat([product(x, table_of_bytes(raw, kind, 512), None, way) for kind, raw, _ in parts], 1)
    assert torch.equal(product(x, table[order], None, way), out[:, order])
    assert torch.equal(product(x, table[5:99], None, way), out[:, 5:99])


@pytest.mark.parametrize("num_outputs", [32, 224, 1600])  # 1600: in larger tiles
def test_a_gated_product_is_the_product_gated(num_outputs: int, way: int) -> None:
    kinds = (0, 8, 12, 14, 20)
    table = RowTable.cat([table_of_bytes(rows_of(kind, num_outputs, 512)[0], kind, 512) for kind in kinds])
    table = replace(table[torch.randperm(len(table))[:num_outputs]], factor=0.3)
    dtype = torch.bfloat16 if way in BFLOAT16 else torch.float32
    x, bias = torch.randn(75, 512).to(dtype), torch.randn(num_outputs).to(dtype)
    whole = compiled.silu_and_mul(product(x, table, bias, way))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = compiled.prefill_product(x, table, bias, way, gated=True)
        assert out is not None
        assert whole is not None
        assert torch.equal(out, whole)
    assert compiled.prefill_product(x, table[: num_outputs - 2], None, way, gated=True) is None


def test_bfloat16_rows_without_its_instructions(way: int) -> None:
    if way in BFLOAT16:
        pytest.skip("for CPUs without them")
    weight, x = (torch.randn(n, 64).to(torch.bfloat16) for n in (40, 20))
    out = product(x, RowTable.of(weight), None, way)
    assert torch.allclose(out.float(), x.float() @ weight.float().T, rtol=0.01, atol=1e-3)


def test_numbers_that_are_none_stay_in_their_row(way: int) -> None:
    raw, _ = rows_of(12, 8, 512)
    x = torch.zeros(3, 512, dtype=torch.bfloat16 if way in BFLOAT16 else torch.float32)
    x[1, 300] = torch.nan
    x[2] = 1e-38
    out = product(x, table_of_bytes(raw, 12, 512), None, way)
    assert not out[0].any()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()


def test_products_that_it_does_not_take(way: int) -> None:
    x = torch.ones(2, 64)
    table = RowTable.of(torch.ones(3, 64))
    assert compiled.prefill_product(x.half(), table, way=way) is None
    assert compiled.prefill_product(x[:, :32], table, way=way) is None
    assert compiled.prefill_product(torch.ones(2, 40), RowTable.of(torch.ones(3, 40)), way=way) is None
    none = compiled.prefill_product(x[:0], table, way=way)
    assert none is not None
    assert none.shape == (0, 3)
