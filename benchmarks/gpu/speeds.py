"""Speed of each kernel against its ceiling (copy bandwidth or bf16 matrix product), and its error against fp64.

`works` yields the measurements of a family, `measure_work` runs one; both run on the CPU too, with the torch backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from cacheblend_kernels import AttentionParams, KernelBackend, KernelError, LayerCache, Slots, select_backend
from gpu.inputs import AttentionInputs, Shape, decode_inputs, prefill_inputs, rope_tables
from gpu.timing import Call, median_seconds, num_input_sets
from kernel_references import stored_kv
from torch import Tensor

LLAMA_8B = Shape("llama-3.1-8b", num_heads=32, num_kv_heads=8, head_dim=128, hidden=4096, intermediate=14336)
LLAMA_1B = Shape("llama-3.2-1b", num_heads=32, num_kv_heads=8, head_dim=64, hidden=2048, intermediate=8192)
TINY = Shape("tiny", num_heads=4, num_kv_heads=2, head_dim=32, hidden=128, intermediate=256)
SUFFIX = 64


@dataclass(frozen=True)
class Work:
    """One measurement: calls (same work, different inputs) and the minimum work of one call.

    bound: its ceiling: "copy" (bytes through device memory) or "matmul" (flops).
    """

    kernel: str
    case: str
    calls: Sequence[Call]
    bound: str
    num_bytes: int = 0
    flops: int = 0


def _device_copy(device: torch.device, tiny: bool) -> float:
    """Return GB/s, bytes read plus bytes written."""
    size = 1 << (20 if tiny else 31)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255) for _ in range(2))
    return 2 * size / median_seconds([partial(target.copy_, source)], device, reps=10) / 1e9


def _matmul(device: torch.device, tiny: bool) -> float:
    """Return TFLOP/s in bf16."""
    n = 256 if tiny else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / median_seconds([partial(torch.matmul, a, b)], device, reps=10) / 1e12


def _host_to_device(device: torch.device, tiny: bool) -> float:
    """Return GB/s from pinned memory."""
    pinned = torch.empty(1 << (20 if tiny else 28), dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(pinned, device=device)
    up = median_seconds([partial(there.copy_, pinned, non_blocking=True)], device, reps=10, graph=False)
    return pinned.numel() / up / 1e9


CEILINGS: dict[str, Callable[[torch.device, bool], float]] = {
    "device_copy_gb_s": _device_copy,
    "matmul_tflop_s": _matmul,
    "host_to_device_gb_s": _host_to_device,
}
"""Measurements of the device's ceilings."""


def works(family: str, device: torch.device, tiny: bool) -> Iterator[Work]:
    """Yield the measurements of one of FAMILIES; backends that cannot run here are left out."""
    return next(make for make in _WORK if make.__name__ == f"_{family}")(device, tiny)


def measure_work(work: Work, device: torch.device, tiny: bool, ceilings: dict[str, Any]) -> dict[str, Any]:
    """Return {kernel, case, seconds, gb_s or tflop_s, ceiling, share}; bytes: each input read and output written once.
    If it raised, {kernel, case, message}."""
    try:
        seconds = median_seconds(work.calls, device, reps=3 if tiny else 20)
    except Exception as error:
        return {"kernel": work.kernel, "case": work.case, "message": f"{type(error).__name__}: {error}"}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    unit, amount, ceiling = (
        ("tflop_s", work.flops / 1e12, ceilings["matmul_tflop_s"])
        if work.bound == "matmul"
        else ("gb_s", work.num_bytes / 1e9, ceilings["device_copy_gb_s"])
    )
    speed = amount / seconds
    row = {"kernel": work.kernel, "case": work.case, "seconds": seconds, unit: speed}
    return {**row, "ceiling": ceiling, "share": speed / ceiling}


def _backends(device: torch.device) -> list[KernelBackend]:
    """Return the backends for attention: ours, and xformers if it imports on a GPU."""
    found = [select_backend("auto", device)]
    if device.type == "cuda":
        try:
            found.append(select_backend("xformers", device))
        except KernelError as error:
            print(f"xformers is left out: {error.message}", file=sys.stderr)
    return found


def _prefill_attention(device: torch.device, tiny: bool) -> Iterator[Work]:
    backends = _backends(device)
    for shape in (TINY,) if tiny else (LLAMA_8B, LLAMA_1B):
        for length in (96,) if tiny else (4096, 16384):
            for kind in ("full", "full paged", "scattered 5%", "scattered 15%", "runs 15%", "suffix"):
                inputs = prefill_inputs(shape, kind, length, min(SUFFIX, length // 4), device)
                params = AttentionParams(shape.head_dim**-0.5)
                seen = int((inputs.meta.positions + 1).sum())
                flops = 4 * shape.num_heads * shape.head_dim * seen
                for backend in backends:
                    if backend.name == "xformers" and kind != "full":
                        continue  # the same kernel as ours
                    call = partial(backend.prefill_attention, inputs.q, inputs.cache, inputs.meta, params)
                    case = f"{shape.name} N={length} {kind}, {inputs.q.shape[0]} rows, {backend.name}"
                    yield Work("prefill_attention", case, [call], "matmul", flops=flops)
                if kind == "full":
                    yield Work(
                        "prefill_attention",
                        f"{shape.name} N={length} {kind}, torch SDPA",
                        [sdpa(inputs, length, params.scale)],
                        "matmul",
                        flops=flops,
                    )


def sdpa(inputs: Any, length: int, scale: float) -> Call:
    """Return a call of torch's causal attention over the same keys, for comparison."""
    q = inputs.q.transpose(0, 1)[None]
    first = inputs.meta.contiguous_slot
    k, v = (
        cache.view(-1, *cache.shape[2:])[first : first + length].transpose(0, 1)[None].contiguous()
        for cache in (inputs.cache.k, inputs.cache.v)
    )
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )


def _decode_attention(device: torch.device, tiny: bool) -> Iterator[Work]:
    names = [backend.name for backend in _backends(device)]
    for shape in (TINY,) if tiny else (LLAMA_8B, LLAMA_1B):
        for batch, length in ((1, 96), (2, 64)) if tiny else ((1, 4096), (1, 16384), (8, 4096), (8, 16384), (64, 4096)):
            per_call = 2 * batch * length * shape.num_kv_heads * shape.head_dim * 2
            sets = num_input_sets(per_call, device)
            inputs = [decode_inputs(shape, batch, length, device, seed) for seed in range(sets)]
            for name in names:
                # one backend per input: xformers' caches host copies of the last tensors
                calls = [_decode_call(select_backend(name, device), one, shape) for one in inputs]
                case = f"{shape.name} batch {batch}, context {length}, {name}"
                yield Work("decode_attention", case, calls, "copy", num_bytes=per_call)
            if shape is not LLAMA_1B:
                scales = torch.full((shape.num_kv_heads,), 0.02, device=device)
                calls = [
                    _decode_call(select_backend("auto", device), one.to_float8(scales, scales), shape) for one in inputs
                ]
                case = f"{shape.name} batch {batch}, context {length}, float8 pool"
                yield Work("decode_attention", case, calls, "copy", num_bytes=per_call // 2)


def _decode_call(backend: KernelBackend, one: AttentionInputs, shape: Shape) -> Call:
    return partial(backend.decode_attention, one.q, one.cache, one.meta, AttentionParams(shape.head_dim**-0.5))


@dataclass(frozen=True)
class _Rows:
    """num_rows rows of a layer's projections, tables and a pool, bf16."""

    shape: Shape
    num_rows: int
    fused: Tensor
    cache: LayerCache
    slots: Slots

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        q, k, v = self.fused.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        return q, k, v

    @property
    def kv_numbers(self) -> int:
        return self.num_rows * self.shape.num_kv_heads * self.shape.head_dim


def _rows(device: torch.device, tiny: bool, per_row: int) -> list[_Rows]:
    """Return input sets that together exceed the cache; per_row: bytes per row that the call moves."""
    shape, num_rows = (TINY, 64) if tiny else (LLAMA_8B, 4096)
    made = []
    for seed in range(num_input_sets(num_rows * per_row, device)):
        torch.manual_seed(seed)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        fused = torch.randn(num_rows, heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        pool = (num_rows // 64, 64, shape.num_kv_heads, shape.head_dim)
        caches = [torch.randn(pool, device=device, dtype=torch.bfloat16) for _ in range(2)]
        slots = Slots(torch.randperm(num_rows, device=device), *rope_tables(num_rows, shape.head_dim, device))
        made.append(_Rows(shape, num_rows, fused, LayerCache(*caches), slots))
    return made


def _rope_and_cache(device: torch.device, tiny: bool) -> Iterator[Work]:
    shape, backend = TINY if tiny else LLAMA_8B, select_backend("auto", device)
    per_row = 2 * (2 * shape.num_heads + 4 * shape.num_kv_heads) * shape.head_dim + 8 * shape.head_dim + 8
    sets = _rows(device, tiny, per_row)
    calls: list[Call] = [partial(backend.rope_and_cache, *r.parts, r.cache, r.slots) for r in sets]
    yield Work("rope_and_cache", f"{sets[0].num_rows} rows", calls, "copy", num_bytes=per_row * sets[0].num_rows)
    per_row = 4 * shape.num_heads * shape.head_dim + 8 * shape.head_dim
    calls = [partial(backend.rope, r.parts[0], r.slots.cos, r.slots.sin) for r in sets]
    yield Work("rope", f"{sets[0].num_rows} rows", calls, "copy", num_bytes=per_row * sets[0].num_rows)


def _load_kv(device: torch.device, tiny: bool) -> Iterator[Work]:
    shape, backend = TINY if tiny else LLAMA_8B, select_backend("auto", device)
    width = shape.num_kv_heads * shape.head_dim
    for codec in ("bf16", "fp16", "fp8", "e5m2", "int8", "int7", "int6", "int4", "int3"):
        per_row = 2 * 2 * width + 8 * shape.head_dim  # pool written, tables read; the stored form is added below
        sets = _rows(device, tiny, per_row)
        stored = [
            stored_kv(codec, r.num_rows, shape.num_kv_heads, shape.head_dim, device, seed=seed)
            for seed, r in enumerate(sets)
        ]
        read = sum(t.numel() * t.element_size() for t in vars(stored[0]).values() if isinstance(t, Tensor))
        calls: list[Call] = [
            partial(backend.load_kv, s, r.cache, replace(r.slots, first_slot=0))
            for r, s in zip(sets, stored, strict=True)
        ]
        num_rows = sets[0].num_rows
        yield Work("load_kv", f"{codec}, {num_rows} rows", calls, "copy", num_bytes=per_row * num_rows + read)


def _kv_deviation(device: torch.device, tiny: bool) -> Iterator[Work]:
    shape, backend = TINY if tiny else LLAMA_8B, select_backend("auto", device)
    for kind in ("v", "k", "kv"):
        per_row = 2 * 2 * shape.num_kv_heads * shape.head_dim * len(kind)
        sets = _rows(device, tiny, per_row)
        calls: list[Call] = [partial(backend.kv_deviation, *r.parts[1:], r.cache, r.slots.slots, kind) for r in sets]
        num_rows = sets[0].num_rows
        yield Work("kv_deviation", f"{kind}, {num_rows} rows", calls, "copy", num_bytes=per_row * num_rows)


def _norms(device: torch.device, tiny: bool) -> Iterator[Work]:
    shape, num_rows = (TINY, 64) if tiny else (LLAMA_8B, 4096)
    backend = select_backend("auto", device)
    weight = torch.randn(shape.hidden, device=device, dtype=torch.bfloat16)
    one = 2 * num_rows * shape.hidden
    sets = num_input_sets(2 * one, device)
    xs, residuals = (
        [torch.randn(num_rows, shape.hidden, device=device, dtype=torch.bfloat16) for _ in range(sets)]
        for _ in range(2)
    )
    calls: list[Call] = [partial(backend.rms_norm, x, weight, 1e-5) for x in xs]
    yield Work("rms_norm", f"{num_rows} x {shape.hidden}", calls, "copy", num_bytes=2 * one)
    calls = [partial(backend.add_rms_norm, x, r, weight, 1e-5) for x, r in zip(xs, residuals, strict=True)]
    yield Work("add_rms_norm", f"{num_rows} x {shape.hidden}", calls, "copy", num_bytes=4 * one)
    one = 2 * num_rows * shape.intermediate
    gates = [
        torch.randn(num_rows, 2 * shape.intermediate, device=device, dtype=torch.bfloat16)
        for _ in range(num_input_sets(3 * one, device))
    ]
    for activation in ("silu", "gelu_pytorch_tanh"):
        calls = [partial(backend.act_and_mul, g, activation) for g in gates]
        case = f"{activation}, {num_rows} x {shape.intermediate}"
        yield Work("act_and_mul", case, calls, "copy", num_bytes=3 * one)


_WORK: tuple[Callable[[torch.device, bool], Iterator[Work]], ...] = (
    _prefill_attention,
    _decode_attention,
    _rope_and_cache,
    _load_kv,
    _kv_deviation,
    _norms,
)


FAMILIES = tuple(make.__name__[1:] for make in _WORK)
