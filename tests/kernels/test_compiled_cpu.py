"""cpu.c against the definitions in fp64 and against torch's operations, and that neither threads nor other rows change
a result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cacheblend_kernels import AttentionParams, KernelError, LayerCache, Slots, compiled
from cacheblend_kernels.torch_attention import prefill_attention
from cacheblend_kernels.torch_backend import TorchBackend, _rotates_alike
from cases import assert_close, attention_case, attention_reference, rope_tables, scattered

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="the compiled code was not built, or does not load")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True, params=["_cpu", "_cpu_avx2"])
def _each_width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the code that this CPU would not choose: either runs on any."""
    code = compiled.loaded(request.param)
    if code is None:
        pytest.skip(f"{request.param} was not built")
    monkeypatch.setattr(compiled, "library", lambda: code)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize(("heads", "head_dim"), [((14, 2), 64), ((4, 4), 80), ((13, 1), 128), ((10, 2), 256)])
def test_decode_attention(
    heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype, threads: None
) -> None:
    lens = [1, 255, 256, 700]
    case = attention_case([[n - 1] for n in lens], lens, heads=heads, head_dim=head_dim, dtype=dtype)
    params = AttentionParams(head_dim**-0.5, window)
    out = compiled.decode_attention(case.q, case.cache, case.meta, params)
    assert out is not None
    assert_close(out, attention_reference(case, params.scale, window), dtype)
    for count, seq in ((1, 3), (2, 1), (3, 3)):
        torch.set_num_threads(count)
        n = case.meta.kv_lens[seq : seq + 1]
        alone = replace(case.meta, block_table=case.meta.block_table[seq : seq + 1], kv_lens=n, max_kv_len=int(n))
        one = compiled.decode_attention(case.q[seq : seq + 1], case.cache, alone, params)
        assert one is not None
        assert torch.equal(one[0], out[seq])


CASES = pytest.mark.parametrize(
    ("heads", "dim", "v_dim"), [((14, 2), 64, 64), ((9, 3), 96, 96), ((5, 1), 256, 256), ((4, 4), 192, 128)]
)


@pytest.mark.parametrize(("sinks", "cap"), [(False, None), (True, None), (True, 3.0)])
@pytest.mark.parametrize("window", [None, 5, 200])
@CASES
@pytest.mark.usefixtures("threads")
def test_prefill_attention_in_float32(
    heads: tuple[int, int], dim: int, v_dim: int, window: int | None, sinks: bool, cap: float | None
) -> None:
    num_keys = 700
    k, v = (torch.randn(num_keys, heads[1], width) for width in (dim, v_dim))
    sink = torch.randn(heads[0]).index_fill(0, torch.tensor([1]), -torch.inf)
    params = AttentionParams(dim**-0.5, window, cap, sink if sinks else None)
    for positions in (torch.arange(150), torch.tensor(scattered(150, num_keys)), torch.tensor([num_keys - 1])):
        q = torch.randn(len(positions), heads[0], dim)
        out = compiled.prefill_attention(q, k, v, positions, params)
        assert out is not None
        assert (out - prefill_attention(q, k, v, positions, params)).abs().max() <= 3e-6
        for count, rows in ((1, slice(-1, None)), (2, slice(0, 90)), (3, slice(0, None, 7))):
            torch.set_num_threads(count)
            some = compiled.prefill_attention(q[rows].contiguous(), k, v, positions[rows], params)
            assert some is not None
            assert torch.equal(some, out[rows])


def test_prefill_attention_in_float32_over_large_logits_and_nan() -> None:
    q, k, v = torch.randn(3, 200, 2, 64)
    k[120, 0] = q[7, 1] = torch.nan
    q[:, 0] *= 1000
    out = compiled.prefill_attention(q, k, v, torch.arange(200), AttentionParams(1.0))
    assert out is not None
    assert out[120:, 0].isnan().all()
    assert out[7, 1].isnan().all()
    assert out[:, 1].isfinite().all(-1).sum() == 199
    before = slice(0, 120)
    exact = prefill_attention(*(x[before] for x in (q, k, v)), torch.arange(120), AttentionParams(1.0))
    assert (out[before, 0] - exact[:, 0]).abs().max() <= 1e-3


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize(("sinks", "cap"), [(False, None), (True, None), (True, 3.0)])
@pytest.mark.parametrize("window", [None, 5, 200])
@CASES
def test_prefill_attention(
    heads: tuple[int, int],
    dim: int,
    v_dim: int,
    window: int | None,
    sinks: bool,
    cap: float | None,
    matrices: bool,
    threads: None,
) -> None:
    torch.manual_seed(0)  # the last case has one row: its error varies by more than a tenth from draw to draw
    num_keys = 700
    k, v = (torch.randn(num_keys, heads[1], width).bfloat16() for width in (dim, v_dim))
    params = AttentionParams(dim**-0.5, window, cap, torch.randn(heads[0]) if sinks else None)
    for positions in (torch.arange(150), torch.tensor(scattered(150, num_keys)), torch.tensor([num_keys - 1])):
        q = torch.randn(len(positions), heads[0], dim).bfloat16()
        out = compiled.prefill_attention(q, k, v, positions, params, matrices=matrices)
        if out is None:
            pytest.skip("no AMX" if matrices else "no AVX512-BF16")
        exact = prefill_attention(q.float(), k.float(), v.float(), positions, params)
        in_tiles = prefill_attention(q, k, v, positions, params)
        error, theirs = ((x - exact).norm() for x in (out, in_tiles))
        assert error <= 1.1 * theirs
        for count, rows in ((1, slice(-1, None)), (2, slice(0, 90)), (3, slice(0, None, 7))):
            torch.set_num_threads(count)
            some = compiled.prefill_attention(
                q[rows].contiguous(), k, v, positions[rows].contiguous(), params, matrices=matrices
            )
            assert some is not None
            assert torch.equal(some, out[rows])


@pytest.mark.parametrize("matrices", [False, True])
def test_prefill_attention_over_large_logits_and_nan(matrices: bool) -> None:
    q, k, v = torch.randn(3, 200, 2, 64).bfloat16()
    k[120, 0] = q[7, 1] = torch.nan
    q[:, 0] *= 1000
    positions = torch.arange(200)
    out = compiled.prefill_attention(q, k, v, positions, AttentionParams(1.0), matrices=matrices)
    if out is None:
        pytest.skip("no AMX" if matrices else "no AVX512-BF16")
    assert out[:120, 0].isfinite().all()  # of the rows before a key that is not a number
    assert out[120:, 0].isnan().all()
    assert out[7, 1].isnan().all()
    assert out[:, 1].isfinite().all(-1).sum() == 199
    before = slice(0, 120)
    exact = prefill_attention(*(x[before].float() for x in (q, k, v)), positions[before], AttentionParams(1.0))
    assert_close(out[before, 0], exact[:, 0].double(), torch.bfloat16)


def test_prefill_attention_that_it_does_not_take() -> None:
    q = k = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    plain, positions = AttentionParams(0.1), torch.arange(4)
    assert compiled.prefill_attention(q.half(), k.half(), k.half(), positions, plain) is None
    assert compiled.prefill_attention(q.float(), k, k, positions, plain) is None
    assert compiled.prefill_attention(q[..., :48], k[..., :48], k, positions, plain) is None
    assert compiled.prefill_attention(q, k.transpose(1, 2).contiguous().transpose(1, 2), k, positions, plain) is None


def test_large_logits_and_padding_rows() -> None:
    case = attention_case([[299]], [300], dtype=torch.bfloat16)
    q = torch.cat((case.q * 100, torch.full_like(case.q, torch.nan)))
    out = compiled.decode_attention(q, case.cache, case.meta, AttentionParams(1.0))
    assert out is not None
    assert_close(out[:1], attention_reference(replace(case, q=q[:1]), 1.0), torch.bfloat16)
    assert not out[1].any()


@DTYPES
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_rms_norm(num_rows: int, wide: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, num_rows, 896).mul_(30).to(dtype)
    weight = torch.randn(896).to(torch.float32 if wide else dtype)
    backend, added = TorchBackend(), residual + x
    out = compiled.rms_norm(x, weight, 1e-6, residual)
    assert out is not None
    assert torch.equal(residual, added)
    torch.testing.assert_close(out, backend._rms_norm(added, weight, 1e-6))
    alone = compiled.rms_norm(added[-1:], weight, 1e-6)
    assert alone is not None
    assert torch.equal(alone[0], out[-1])


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 70])
def test_silu_and_mul(num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(num_rows, 2 * 1008).mul_(20).to(dtype)
    x[0, :5] = torch.tensor([0.0, -0.0, 80.0, -80.0, torch.nan])
    out = compiled.silu_and_mul(x)
    assert out is not None
    gate, up = x.double().chunk(2, -1)
    silu = torch.nn.functional.silu(gate).to(dtype)
    torch.testing.assert_close(out, (silu.double() * up).to(dtype), equal_nan=True)
    alone = compiled.silu_and_mul(x[-1:])
    assert alone is not None
    torch.testing.assert_close(alone[0], out[-1], rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(compiled, "library", lambda: None)
    torch.testing.assert_close(TorchBackend().act_and_mul(x, "silu"), out, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 300])
def test_rope_and_cache_is_torchs_to_the_bit(num_rows: int, dtype: torch.dtype) -> None:
    if not _rotates_alike():
        pytest.skip("torch's build for this CPU does not fuse a product with a sum")
    heads, dim = (3, 2), 24
    fused_qkv = torch.randn(num_rows, heads[0] + 2 * heads[1], dim).to(dtype)
    q, k, v = fused_qkv.split((heads[0], heads[1], heads[1]), 1)
    slots = Slots(torch.randperm(320)[:num_rows], *rope_tables(num_rows, dim))
    ours, theirs = (LayerCache(*torch.zeros(2, 20, 16, heads[1], dim).to(dtype)) for _ in range(2))
    backend = TorchBackend()
    rotated = compiled.rope_and_cache(q, k, v, ours, slots)
    wanted = backend._rope_and_cache(q, k, v, theirs, slots)
    assert rotated is not None
    assert rotated[0] is not None
    assert wanted is not None
    assert torch.equal(rotated[0], wanted)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


@pytest.mark.parametrize("slot", [-1, 32])
def test_a_slot_outside_the_pool_writes_nothing(slot: int) -> None:
    cache = LayerCache(torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16))
    slots = Slots(torch.tensor([3, slot]), *rope_tables(2, 16))
    x = torch.ones(2, 1, 16)
    with pytest.raises(KernelError):
        compiled.rope_and_cache(x, x, x, cache, slots)
    assert not cache.k.any()
    assert not cache.v.any()


def test_what_it_does_not_take_is_left_to_torch() -> None:
    case = attention_case([[9]], [10], head_dim=24)
    assert compiled.decode_attention(case.q, case.cache, case.meta, AttentionParams(1.0)) is None
    assert compiled.rms_norm(torch.ones(2, 20), torch.ones(20), 1e-6) is None
    half = torch.ones(2, 32, dtype=torch.float16)
    assert compiled.rms_norm(half, torch.ones(32), 1e-6) is None
    assert compiled.silu_and_mul(half) is None
    assert compiled.silu_and_mul(torch.ones(2, 40)) is None
    assert compiled.silu_and_mul(torch.ones(64, 2).t()) is None


@DTYPES
@pytest.mark.parametrize("keys", [[5], list(range(256)), list(range(300))])
def test_nan_in_is_nan_out(keys: list[int], dtype: torch.dtype) -> None:
    case = attention_case([[299]], [300], dtype=dtype)
    block_size = case.cache.k.shape[1]
    for key in keys:
        case.cache.k[case.meta.block_table[0, key // block_size], key % block_size] = torch.nan
    out = compiled.decode_attention(case.q, case.cache, case.meta, AttentionParams(1.0))
    assert out is not None
    assert out.isnan().all()


def test_a_sequence_without_keys_is_0() -> None:
    case = attention_case([[299]], [300])
    empty = replace(case.meta, kv_lens=torch.zeros_like(case.meta.kv_lens))
    out = compiled.decode_attention(case.q, case.cache, empty, AttentionParams(1.0))
    assert out is not None
    assert not out.any()


def test_shapes_that_do_not_fit_are_left_to_torch() -> None:
    assert compiled.rms_norm(torch.ones(2, 32), torch.ones(16), 1e-6) is None
    assert compiled.rms_norm(torch.ones(2, 32), torch.ones(32), 1e-6, torch.ones(1, 32)) is None
    case, params = attention_case([[9]], [10], heads=(4, 2), head_dim=16), AttentionParams(1.0)
    for meta in (
        replace(case.meta, block_table=case.meta.block_table.long()),
        replace(case.meta, kv_lens=case.meta.kv_lens.long()),
        replace(case.meta, max_kv_len=1 << 20),
    ):
        assert compiled.decode_attention(case.q, case.cache, meta, params) is None
    assert compiled.decode_attention(case.q[:, :3], case.cache, case.meta, params) is None
    strided = LayerCache(*(pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in (case.cache.k, case.cache.v)))
    assert compiled.decode_attention(case.q, strided, case.meta, params) is None
    cache, x = LayerCache(torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16)), torch.ones(2, 1, 16)
    slots, tables = torch.tensor([3, 4]), rope_tables(2, 16)
    for wrong in (Slots(slots.int(), *tables), Slots(slots, *rope_tables(2, 8)), Slots(slots[:1], *tables)):
        assert compiled.rope_and_cache(x, x, x, cache, wrong) is None


def test_code_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ABI", compiled.ABI + 1)
    assert compiled.loaded("_cpu") is compiled.loaded("_cpu_avx2") is None
