"""Stored K and V into the pool: every codec's layout, dequantised in fp64 by the test itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cacheblend_kernels import KernelBackend, KernelError, LayerCache, Slots, StoredKV
from cacheblend_kernels.triton_backend.backend import TritonBackend
from cacheblend_kernels.triton_backend.load_kv import load_kv
from cases import TOLERANCE, held, moved, rope_tables
from kernel_references import CODECS, decoded, rope_reference, stored_chunks, stored_kv, stored_layers

BLOCK_SIZE = 8
CPU = torch.device("cpu")


def stored(codec: str, *shape: int) -> tuple[StoredKV, torch.Tensor, torch.Tensor]:
    """(what is stored, K and V it stands for in fp64) of shape (num_rows, num_kv_heads, head_dim)."""
    made = stored_kv(codec, *shape, CPU)
    return made, *decoded(made, shape[2])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("heads", "dim", "pool_dtype", "run"),
    [
        (2, 64, torch.float32, True),
        (9, 80, torch.bfloat16, False),
        pytest.param(2, 64, torch.float32, False, marks=pytest.mark.torture),
        pytest.param(9, 80, torch.bfloat16, True, marks=pytest.mark.torture),
    ],
)
def test_load_kv(codec: str, heads: int, dim: int, pool_dtype: torch.dtype, run: bool, device: torch.device) -> None:
    num_rows = 6
    given, k_value, v_value = stored(codec, num_rows, heads, dim)
    cos, sin = rope_tables(num_rows, dim)
    slots = torch.arange(13, 13 + num_rows) if run else torch.randperm(48)[:num_rows]
    pools = [torch.full((6, BLOCK_SIZE, heads, dim), 7.0, device=device).to(pool_dtype) for _ in range(2)]
    where = Slots(slots, cos, sin, 13 if run else -1)
    load_kv(moved(given, device), LayerCache(*pools), moved(where, device))
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    for pool, want in zip(pools, (rope_reference(k_value, cos, sin), v_value), strict=True):
        flat = held(pool)
        tolerance = TOLERANCE[pool_dtype]
        torch.testing.assert_close(flat[slots], want, atol=tolerance, rtol=tolerance)
        assert (flat[others] == 7.0).all()


def test_plain_values_of_one_dtype_are_copied_exactly(device: torch.device) -> None:
    v = torch.randn(5, 2, 32).to(torch.bfloat16)
    cos, sin = torch.ones(5, 32), torch.zeros(5, 32)
    pools = [torch.zeros(2, BLOCK_SIZE, 2, 32, dtype=torch.bfloat16, device=device) for _ in range(2)]
    where = moved(Slots(torch.arange(5), cos, sin, first_slot=2), device)
    load_kv(moved(StoredKV(v, v), device), LayerCache(*pools), where)
    for pool in pools:
        assert torch.equal(pool.cpu().view(-1, 2, 32)[2:7], v)


@pytest.mark.parametrize("codec", ["bf16", "int7"])
def test_float8_pool(codec: str, device: torch.device) -> None:
    given, k_value, v_value = stored(codec, 5, 2, 32)
    cos, sin = rope_tables(5, 32)
    scales = torch.tensor([0.02, 0.05]), torch.tensor([0.03, 0.01])
    pools = [torch.zeros(2, BLOCK_SIZE, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    where = moved(Slots(torch.arange(5), cos, sin, first_slot=0), device)
    load_kv(moved(given, device), moved(LayerCache(*pools, *scales), device), where)
    for pool, scale, want in zip(pools, scales, (rope_reference(k_value, cos, sin), v_value), strict=True):
        torch.testing.assert_close(held(pool, scale)[:5], want, atol=2e-3, rtol=0.07)


def layer_caches(
    num_layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, *, apart: bool = False
) -> list[LayerCache]:
    """Pools of 48 slots that hold NaN, in one allocation for K and one for V, or each layer's apart."""
    pools = [torch.full((num_layers, 6, BLOCK_SIZE, heads, dim), torch.nan, device=device).to(dtype) for _ in range(2)]
    scales: list[torch.Tensor] = []
    if dtype == torch.float8_e4m3fn:
        scales = [0.01 + torch.rand(num_layers, -(-heads // 4) * 4, device=device)[:, :heads] for _ in range(2)]
    caches = [LayerCache(*(part[layer] for part in (*pools, *scales))) for layer in range(num_layers)]
    return [
        LayerCache(**{name: t.clone() for name, t in vars(c).items() if t is not None}) if apart else c for c in caches
    ]


LENGTHS, LAYERS = (3, 1, 4), 2


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("heads", "first_head", "dim", "pool_dtype", "run", "apart"),
    [
        (2, 0, 64, torch.float32, True, False),
        (9, 1, 80, torch.bfloat16, False, False),
        (1, 2, 128, torch.float8_e4m3fn, True, False),
        (2, 1, 32, torch.bfloat16, False, True),
        pytest.param(3, 0, 256, torch.float16, True, False, marks=pytest.mark.torture),
        pytest.param(3, 1, 64, torch.float8_e4m3fn, False, True, marks=pytest.mark.torture),
    ],
)
def test_load_layers(
    codec: str, heads: int, first_head: int, dim: int, pool_dtype: torch.dtype, run: bool, apart: bool,
    device: torch.device,
) -> None:  # fmt: skip
    """Chunks of several lengths at two layers, some of the stored heads: right, and to the bit what `load_kv` writes of
    each chunk and layer."""
    torch.manual_seed(0)
    of_heads = slice(first_head, first_head + heads)
    given = stored_chunks(codec, LENGTHS, LAYERS, heads + 2, dim, CPU)
    num_rows = sum(LENGTHS)
    cos, sin = rope_tables(num_rows, dim)
    slots = torch.arange(13, 13 + num_rows) if run else torch.randperm(48)[:num_rows]
    where = moved(Slots(slots, cos, sin, 13 if run else -1), device)
    caches, single = (layer_caches(LAYERS, heads, dim, pool_dtype, device, apart=apart) for _ in range(2))
    single = [replace(own, k_scale=c.k_scale, v_scale=c.v_scale) for own, c in zip(single, caches, strict=True)]
    backend, staged = TritonBackend(device), stored_layers(given, first_head)
    moved_chunks = {name: t.to(device) for name, t in vars(staged).items() if isinstance(t, torch.Tensor)}
    backend.load_layers(replace(staged, **moved_chunks), caches, where)
    KernelBackend.load_layers(backend, replace(staged, **moved_chunks), single, where)
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    tolerance = TOLERANCE.get(pool_dtype, 0.07)
    for layer, (cache, alone) in enumerate(zip(caches, single, strict=True)):
        values = [decoded(chunk[layer], dim) for chunk in given]
        k_value, v_value = (torch.cat(parts)[:, of_heads] for parts in zip(*values, strict=True))
        wanted = rope_reference(k_value, cos, sin), v_value
        for pool, ours, scale, want in zip(
            (cache.k, cache.v), (alone.k, alone.v), (cache.k_scale, cache.v_scale), wanted, strict=True
        ):
            most = torch.inf if scale is None else 448 * scale.cpu().double()[:, None]
            assert torch.equal(pool.view(torch.uint8), ours.view(torch.uint8))
            flat = held(pool, scale)
            torch.testing.assert_close(flat[slots], want.clamp(-most, most), atol=tolerance, rtol=tolerance)
            assert flat[others].isnan().all()


def test_refusals_of_layers(device: torch.device) -> None:
    staged = stored_layers(stored_chunks("int7", (2, 3), LAYERS, 2, 32, device))
    slots = moved(Slots(torch.arange(5), *rope_tables(5, 32)), device)
    caches, backend = layer_caches(LAYERS, 2, 32, torch.float32, device), TritonBackend(device)
    first, second = staged.chunks
    other = replace(second, tensors={n: t for n, t in second.tensors.items() if n != "k_mean"})
    moved_on = replace(second, tensors={n: t._replace(start=t.start + 8) for n, t in second.tensors.items()})
    for match, wrong in (
        ("heads from 1", replace(staged, first_head=1)),
        ("differ in format", replace(staged, chunks=(first, other))),
        ("3 rows of chunks, 5 rows", replace(staged, chunks=(second,))),
        ("multiples of 64", replace(staged, chunks=(first, moved_on))),
        ("past the buffer", replace(staged, data=staged.data[:-64])),
        ("k_levels", replace(staged, k_levels=None)),
        ("table", replace(staged, table=staged.table.int())),
    ):
        with pytest.raises(KernelError, match=match):
            backend.load_layers(wrong, caches, slots)
    with pytest.raises(KernelError, match="pools differ"):
        backend.load_layers(staged, [caches[0], LayerCache(caches[1].k.half(), caches[1].v.half())], slots)


def test_refusals(device: torch.device) -> None:
    codes = moved(stored("int7", 5, 2, 32)[0], device)
    plain = moved(stored("fp32", 5, 2, 32)[0], device)
    pools = [torch.zeros(2, BLOCK_SIZE, 2, 32, device=device) for _ in range(2)]
    cache, slots = LayerCache(*pools), moved(Slots(torch.arange(5), *rope_tables(5, 32)), device)
    with pytest.raises(KernelError, match="k_mean"):
        load_kv(replace(codes, k_mean=None), cache, slots)
    with pytest.raises(KernelError, match="v_levels"):
        load_kv(replace(codes, v_levels=None), cache, slots)
    with pytest.raises(KernelError, match=r"codes of \(3, 6\) bits"):
        load_kv(replace(codes, k_levels=codes.k_levels[:8]), cache, slots)
    with pytest.raises(KernelError, match="k_scale"):
        load_kv(replace(codes, k_scale=codes.k_scale.float()), cache, slots)
    with pytest.raises(KernelError, match="float32"):
        load_kv(replace(plain, k_scale=codes.k_scale), cache, slots)
    assert codes.k_mean is not None
    with pytest.raises(KernelError, match="k_mean"):
        load_kv(replace(codes, k_mean=codes.k_mean.repeat(2, 1, 1)), cache, slots)
    with pytest.raises(KernelError, match="slots"):
        load_kv(plain, cache, replace(slots, first_slot=12))
    float8 = [pool.to(torch.float8_e4m3fn) for pool in pools]
    with pytest.raises(KernelError, match="v_scale"):
        load_kv(plain, LayerCache(*float8, k_scale=torch.ones(2, device=device)), slots)
    with pytest.raises(KernelError, match="device"):
        load_kv(plain, cache, replace(slots, slots=slots.slots.to("meta")))
