"""Numbers of every kernel on a device, in fp16 and bf16, against fp64 on the same inputs.

Outputs and pool slots without a key start as NaN, so that missing writes and wrong reads show. The error of a case is
the largest |got - want| / |want| over its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from cacheblend_kernels import AttentionParams, KernelBackend, LayerCache, Slots, select_backend
from gpu.inputs import AttentionInputs, attention_inputs, rope_tables, scattered_positions
from kernel_references import decoded, poisoned_outputs, rope_reference, stored_kv
from torch import Tensor

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
FLOAT8 = 2**-4  # half a step of a number with three bits after the first
NUM_ROWS = 70
Case = tuple[str, str, float, Callable[[], tuple[Tensor, Tensor]]]  # kernel, case, tolerance, () -> (got, want fp64)


def checks_of(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the name of each case and a function that returns its row."""
    for backend in _backends(device):
        for dtype in (torch.float16, torch.bfloat16):
            for case in _cases(backend, device, dtype, tiny):
                yield f"{case[0]} {case[1]} {dtype} {backend.name}", partial(_check, backend, dtype, case)


def _check(backend: KernelBackend, dtype: torch.dtype, case: Case) -> dict[str, Any]:
    kernel, name, tolerance, run = case
    row: dict[str, Any] = {"kernel": kernel, "case": name, "dtype": str(dtype).removeprefix("torch.")}
    row |= {"backend": backend.name, "tolerance": tolerance}
    try:
        with poisoned_outputs():
            got, want = run()
        error = row_error(got, want)
    except Exception as fault:  # a failed launch is a result; the other cases still run
        return {**row, "error": float("nan"), "ok": False, "message": f"{type(fault).__name__}: {fault}"}
    return {**row, "error": error, "ok": error <= tolerance}


def row_error(got: Tensor, want: Tensor) -> float:
    """Return the largest |got - want| / |want| over the first dimension; NaN in `got` gives NaN, which fails every
    comparison."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    error = (got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-30)
    return float(error.nan_to_num(nan=float("inf")).max()) if not got.isnan().any() else float("nan")


def _backends(device: torch.device) -> list[KernelBackend]:
    """Return the backends to check, ours for a GPU first."""
    names = ("triton", "torch") if device.type == "cuda" else ("torch",)
    return [select_backend(name, device) for name in names]


def _cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Case]:
    yield from _attention_cases(backend, device, dtype, tiny)
    yield from _cache_cases(backend, device, dtype)
    yield from _row_cases(backend, device, dtype)
    if backend.has_attention_peaks:
        yield from _peak_cases(backend, device, dtype, tiny)


def attention_reference(
    inputs: AttentionInputs,
    params: AttentionParams,
) -> Tensor:
    """Return fp64 softmax attention over the keys up to each row's position, per sequence, [num_rows, num_heads,
    head_dim]."""
    q, meta, cache = inputs.q.double(), inputs.meta, inputs.cache
    block_size, num_kv_heads = cache.k.shape[1:3]
    out = torch.full_like(q, torch.nan)
    for seq, kv_len in enumerate(meta.kv_lens.tolist()):
        begin, end = meta.cu_rows[seq : seq + 2].tolist()
        blocks = meta.block_table[seq, : -(-kv_len // block_size)].long()
        k, v = (
            held(pool[blocks].flatten(0, 1)[:kv_len], scale)
            for pool, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )
        group = q.shape[1] // num_kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        for start in range(begin, end, 512):  # rows x keys in fp64 stay small
            rows = slice(start, min(start + 512, end))
            weights = _weights(q[rows], k, meta.positions[rows], params)
            out[rows] = torch.einsum("hrn,nhd->rhd", weights, v)
    return out


def _weights(q: Tensor, k: Tensor, positions: Tensor, params: AttentionParams) -> Tensor:
    """Return fp64 softmax weights [num_heads, num_rows, num_keys] of rows on the keys up to their positions."""
    key_pos, row_pos = torch.arange(len(k), device=q.device), positions[:, None]
    hidden = key_pos > row_pos
    if params.sliding_window is not None:
        hidden |= key_pos <= row_pos - params.sliding_window
    logits = torch.einsum("rhd,nhd->hrn", q, k) * params.scale
    if params.soft_cap is not None:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    return torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)


def _peak_cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Case]:
    length = 96 if tiny else 3000
    for heads, head_dim, float8 in product(((32, 8), (7, 1)), (64, 80, 128, 256), (False, True)):
        case = f"heads {heads}, head_dim {head_dim}{', float8 pool' * float8}"
        run = partial(_peaks, backend, device, dtype, length, heads, head_dim, float8)
        yield "attention_peaks", case, TOLERANCE[dtype], run


def _peaks(
    backend: KernelBackend,
    device: torch.device,
    dtype: torch.dtype,
    length: int,
    heads: tuple[int, int],
    head_dim: int,
    float8: bool,
) -> tuple[Tensor, Tensor]:
    inputs = attention_inputs([torch.arange(length)[-40:]], [length], *heads, head_dim, device, dtype=dtype)
    inputs = inputs.to_float8(*_pool_scales(heads[1], device)) if float8 else inputs
    params, cache, meta = AttentionParams(head_dim**-0.5), inputs.cache, inputs.meta
    peaks = torch.zeros(length, device=device)
    backend.attention_peaks(inputs.q, meta.positions, cache, meta, params, peaks)
    k = held(cache.k[meta.block_table[0].long()].flatten(0, 1)[:length], cache.k_scale)
    weights = _weights(inputs.q.double(), k.repeat_interleave(heads[0] // heads[1], 1), meta.positions, params)
    return peaks[None], weights.amax((0, 1))[None]


def _attention_cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Case]:
    prefill = partial(_attention, backend, device, dtype, "prefill_attention")

    def decode(case: str, kv_lens: list[int], *shape: Any, **options: Any) -> Case:
        last = [torch.tensor([n - 1]) for n in kv_lens]
        return _attention(backend, device, dtype, "decode_attention", case, last, kv_lens, *shape, **options)

    length = 96 if tiny else 1500
    rows = scattered_positions(length, length // 3)
    for heads in ((4, 4), (8, 2), (7, 1), (16, 2), (32, 8)):
        yield prefill(f"heads {heads}", [rows], [length], heads, 64)
        yield decode(f"heads {heads}", [length, 1, 65], heads, 64)
    for head_dim in (64, 80, 96, 128, 256):
        yield prefill(f"head_dim {head_dim}", [rows], [length], (8, 2), head_dim)
        yield decode(f"head_dim {head_dim}", [length, 17], (8, 2), head_dim)
    for block_size in (16, 64):
        for contiguous in (False, True):
            case = f"block {block_size}{', adjacent' * contiguous}"
            options = {"block_size": block_size, "contiguous": contiguous}
            yield prefill(case, [rows], [length], (8, 2), 128, **options)
            yield decode(case, [length], (8, 2), 128, **options)
    for window in (1, 50, 64, 700):
        yield prefill(f"window {window}", [rows], [length], (8, 2), 128, window=window)
        yield decode(f"window {window}", [length, 30], (8, 2), 128, window=window)
    for cap, window in ((0.5, None), (30.0, None), (30.0, 50)):
        case = f"soft cap {cap}, window {window}"
        yield prefill(case, [rows], [length], (8, 2), 256, cap=cap, window=window)
        yield decode(case, [length, 30], (8, 2), 256, cap=cap, window=window)
    yield prefill("float8 pool", [rows], [length], (8, 2), 128, float8=True)
    yield decode("float8 pool", [length, 40], (8, 2), 128, float8=True)
    whole = torch.arange(length)
    yield prefill("full", [whole], [length], (8, 2), 128, contiguous=True)
    yield prefill("full, paged", [whole], [length], (8, 2), 128)
    yield prefill("suffix", [whole[-40:]], [length], (32, 8), 128)
    yield prefill("one row", [whole[-1:]], [length], (32, 8), 128)
    several = [torch.tensor([0]), rows, torch.tensor([], dtype=torch.int64), whole[:33], torch.tensor([3, 4, 60])]
    lens = [1, length, 5, 33, 64]
    yield prefill("several sequences", several, lens, (8, 2), 128)
    many = [1 + (37 * i) % length for i in range(8 if tiny else 64)]
    yield decode("many sequences", many, (8, 2), 128)
    if not tiny:
        long = 9000
        wide = scattered_positions(long, 1000, run=7)
        yield prefill("long", [wide], [long], (32, 8), 128)
        yield decode("long", [long], (32, 8), 128)


def _attention(
    backend: KernelBackend,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str,
    case: str,
    positions: list[Tensor],
    kv_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    *,
    window: int | None = None,
    cap: float | None = None,
    float8: bool = False,
    **options: Any,
) -> Case:
    def run() -> tuple[Tensor, Tensor]:
        inputs = attention_inputs(positions, kv_lens, *heads, head_dim, device, dtype=dtype, **options)
        inputs = inputs.to_float8(*_pool_scales(heads[1], device)) if float8 else inputs
        params = AttentionParams(head_dim**-0.5, window, cap)
        got = getattr(backend, kernel)(inputs.q, inputs.cache, inputs.meta, params)
        return got, attention_reference(inputs, params)

    return kernel, case, TOLERANCE[dtype], run


def _pool_scales(num_kv_heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scales of a float8 pool; K's and V's differ, so that swapped ones show."""
    return (
        torch.linspace(0.01, 0.03, num_kv_heads, device=device),
        torch.linspace(0.05, 0.02, num_kv_heads, device=device),
    )


def held(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Return rows [n, num_kv_heads, head_dim] of a pool in fp64."""
    return rows.float().double() if scale is None else rows.float().double() * scale.double()[:, None]


def _cache_cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for head_dim, float8 in (*product((64, 80, 96, 128, 256), (False,)), (80, True), (128, True)):
        case, tolerance = f"head_dim {head_dim}{', float8 pool' * float8}", FLOAT8 if float8 else TOLERANCE[dtype]
        yield "rope_and_cache", case, tolerance, partial(_write, backend, device, dtype, head_dim, float8)
        for codec in ("bf16", "fp16", "fp8", "int7", "int4"):
            for run in (True, False) if head_dim in (80, 128) else (True,):
                name = f"{codec}, {case}, {'adjacent slots' if run else 'a slot mapping'}"
                yield "load_kv", name, tolerance, partial(_load, backend, device, dtype, head_dim, codec, run, float8)
    for head_dim in (64, 80, 128):

        def rotate(head_dim: int = head_dim) -> tuple[Tensor, Tensor]:
            x = torch.randn(NUM_ROWS, 36, head_dim, device=device, dtype=dtype)[:, :28]
            tables = rope_tables(NUM_ROWS, head_dim, device)
            return backend.rope(x, *tables), rope_reference(x, *tables)

        yield "rope", f"head_dim {head_dim}", TOLERANCE[dtype], rotate


def _write(
    backend: KernelBackend, device: torch.device, dtype: torch.dtype, head_dim: int, float8: bool
) -> tuple[Tensor, Tensor]:
    """Run rope_and_cache; return rotated q with the slots' contents, and the reference."""
    fused = torch.randn(NUM_ROWS, 36, head_dim, device=device, dtype=dtype)
    q, k, v = fused.split((28, 4, 4), dim=1)
    tables, slots = rope_tables(NUM_ROWS, head_dim, device), torch.randperm(128, device=device)[:NUM_ROWS]
    cache = _pools(head_dim, device, dtype, float8)
    out = backend.rope_and_cache(q, k, v, cache, Slots(slots, *tables))
    assert out is not None
    want = rope_reference(q, *tables).flatten(1), *_holdable(rope_reference(k, *tables), v.double(), cache)
    return torch.cat([out.flatten(1), *_held(cache, slots)], 1), torch.cat(want, 1)


def _load(
    backend: KernelBackend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    codec: str,
    run: bool,
    float8: bool,
) -> tuple[Tensor, Tensor]:
    """Run load_kv; return the slots' contents and their reference. run: slots are adjacent, and no slot mapping is
    read."""
    num_chunks = 1 if codec in ("bf16", "fp16") else 3
    stored = stored_kv(codec, NUM_ROWS, 4, head_dim, device, num_chunks=num_chunks)
    tables = rope_tables(NUM_ROWS, head_dim, device)
    cache = _pools(head_dim, device, dtype, float8)
    slots = torch.arange(7, 7 + NUM_ROWS, device=device) if run else torch.randperm(128, device=device)[:NUM_ROWS]
    where = Slots(torch.full_like(slots, -1), *tables, 7) if run else Slots(slots, *tables)
    backend.load_kv(stored, cache, where)
    k, v = decoded(stored, head_dim)
    want = _holdable(rope_reference(k, *tables), v, cache)
    return torch.cat(_held(cache, slots), 1), torch.cat(want, 1)


def _pools(head_dim: int, device: torch.device, dtype: torch.dtype, float8: bool) -> LayerCache:
    """Return a pool of 128 slots with 4 heads, filled with NaN."""
    dtype = torch.float8_e4m3fn if float8 else dtype
    pools = [torch.full((2, 64, 4, head_dim), torch.nan, device=device).to(dtype) for _ in range(2)]
    return LayerCache(*pools, *(_pool_scales(4, device) if float8 else ()))


def _holdable(k: Tensor, v: Tensor, cache: LayerCache) -> list[Tensor]:
    """Return fp64 K and V [num_rows, 4, head_dim] as rounded by the pool, flat."""
    found = []
    for x, scale in ((k, cache.k_scale), (v, cache.v_scale)):
        if scale is not None:
            most = 448 * scale.double()[:, None]
            x = torch.minimum(torch.maximum(x, -most), most)
        found.append(x.flatten(1))
    return found


def _held(cache: LayerCache, slots: Tensor) -> list[Tensor]:
    """Return K and V of the slots, [num_rows, 4 * head_dim] each."""
    pools = ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    return [held(pool.view(128, 4, -1)[slots], scale).flatten(1) for pool, scale in pools]


def _norm_reference(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def _row_cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    tolerance = TOLERANCE[dtype]

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(dtype)

    for kind, float8 in product(("k", "v", "kv"), (False, True)):

        def deviation(kind: str = kind, float8: bool = float8) -> tuple[Tensor, Tensor]:
            k, v = random(50, 16, 128).split(8, dim=1)
            pools, slots = [random(2, 64, 8, 128) for _ in range(2)], torch.randperm(128, device=device)[:50]
            cache = LayerCache(*pools)
            if float8:
                pools = [(20 * p.float()).to(torch.float8_e4m3fn) for p in pools]
                cache = LayerCache(*pools, *_pool_scales(8, device))
            olds = [
                held(pool.view(128, 8, 128)[slots], scale)
                for pool, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
            ]
            want = sum(
                (fresh.double() - old).square().sum((1, 2))
                for part, fresh, old in zip("kv", (k, v), olds, strict=True)
                if part in kind
            )
            assert isinstance(want, Tensor)
            return backend.kv_deviation(k, v, cache, slots, kind)[:, None], want[:, None]

        yield "kv_deviation", f"{kind}{', float8 pool' * float8}", 1e-5, deviation
    for width in (80, 128, 2048, 4096, 8192):

        def norm(width: int = width) -> tuple[Tensor, Tensor]:
            x, residual, weight = random(33, width), random(33, width), random(width)
            kept = residual.clone()
            out, total = backend.add_rms_norm(x, residual, weight, 1e-5)
            return torch.cat((out, total), 1), torch.cat(
                (_norm_reference(total, weight), x.double() + kept.double()), 1
            )

        def plain_norm(width: int = width) -> tuple[Tensor, Tensor]:
            x, weight = random(33, width), random(width)
            return backend.rms_norm(x, weight, 1e-5), _norm_reference(x, weight)

        yield "add_rms_norm", f"width {width}", tolerance, norm
        yield "rms_norm", f"width {width}", tolerance, plain_norm
    for heads, head_dim in ((28, 128), (4, 80)):  # QK-norm: heads of a fused projection

        def head_norm(heads: int = heads, head_dim: int = head_dim) -> tuple[Tensor, Tensor]:
            x, weight = random(33, heads + 8, head_dim)[:, :heads], random(head_dim)
            return backend.rms_norm(x, weight, 1e-5), _norm_reference(x, weight)

        yield "rms_norm", f"{heads} strided heads of {head_dim}", tolerance, head_norm
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    for name, function in activations.items():

        def activate(name: str = name, function: Callable[[Tensor], Tensor] = function) -> tuple[Tensor, Tensor]:
            gate_up = 3 * random(40, 2 * 1100)
            gate, up = gate_up.double().chunk(2, -1)
            return backend.act_and_mul(gate_up, name), function(gate) * up

        yield "act_and_mul", name, tolerance, activate
