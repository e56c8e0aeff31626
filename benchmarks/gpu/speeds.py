"""Speed of each kernel against its ceiling (copy bandwidth or bf16 matrix product), and its error against fp64.

They run on the CPU too, with the torch backend.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from cacheblend_kernels import (
    AttentionParams,
    KernelBackend,
    LayerCache,
    Regressed,
    RegressionPrior,
    Slots,
    select_backend,
)
from gpu.context import Cases, Context, Rows
from gpu.inputs import AttentionInputs, Shape, decode_inputs, prefill_inputs, rope_tables
from gpu.timing import Call, median_seconds, num_input_sets
from kernel_references import stored_chunks, stored_layers
from torch import Tensor

LLAMA_8B = Shape("llama-3.1-8b", num_heads=32, num_kv_heads=8, head_dim=128)
TINY = Shape("tiny", num_heads=4, num_kv_heads=2, head_dim=32)
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


def cases(context: Context) -> Cases:
    def run(work: Work) -> Rows:
        yield "kernels", measure_work(work, context.device, context.tiny, context.log.ceilings())
        context.synchronize()

    for make in FAMILIES:
        try:
            for work in make(context.device, context.tiny):
                yield f"{work.kernel} {work.case}", partial(run, work)
        except Exception as error:  # inputs of this family; others continue
            traceback.print_exc()
            message = f"{make.__name__[1:]}: {type(error).__name__}: {error}"
            context.log.write(context.step, "", "fault", message=message)


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


def _prefill_attention(device: torch.device, tiny: bool) -> Iterator[Work]:
    shape, backend = TINY if tiny else LLAMA_8B, select_backend("auto", device)
    params = AttentionParams(shape.head_dim**-0.5)
    for length in (96,) if tiny else (4096, 16384):
        for kind in ("full", "scattered 15%", "suffix", "full paged"):
            inputs = prefill_inputs(shape, kind, length, min(SUFFIX, length // 4), device)
            flops = 4 * shape.num_heads * shape.head_dim * int((inputs.meta.positions + 1).sum())
            call = partial(backend.prefill_attention, inputs.q, inputs.cache, inputs.meta, params)
            case = f"{shape.name} N={length} {kind}, {inputs.q.shape[0]} rows, {backend.name}"
            yield Work("prefill_attention", case, [call], "matmul", flops=flops)


def _decode_attention(device: torch.device, tiny: bool) -> Iterator[Work]:
    shape, backend = TINY if tiny else LLAMA_8B, select_backend("auto", device)
    for batch, length in ((1, 96), (2, 64)) if tiny else ((1, 4096), (8, 4096), (32, 4096), (1, 16384), (8, 16384)):
        per_call = 2 * batch * length * shape.num_kv_heads * shape.head_dim * 2
        sets = num_input_sets(per_call, device)
        inputs = [decode_inputs(shape, batch, length, device, seed) for seed in range(sets)]
        case = f"{shape.name} batch {batch}, context {length}"
        calls = [_decode_call(backend, one, shape) for one in inputs]
        yield Work("decode_attention", f"{case}, {backend.name}", calls, "copy", num_bytes=per_call)
        scales = torch.full((shape.num_kv_heads,), 0.02, device=device)
        calls = [_decode_call(backend, one.to_float8(scales, scales), shape) for one in inputs]
        yield Work("decode_attention", f"{case}, float8 pool", calls, "copy", num_bytes=per_call // 2)


def _decode_call(backend: KernelBackend, one: AttentionInputs, shape: Shape) -> Call:
    return partial(backend.decode_attention, one.q, one.cache, one.meta, AttentionParams(shape.head_dim**-0.5))


def _load_kv(device: torch.device, tiny: bool) -> Iterator[Work]:
    """Eight chunks at several layers in one launch, as a prompt's stored KV is loaded."""
    (shape, num_rows, num_layers), backend = (
        (TINY, 64, 2) if tiny else (LLAMA_8B, 4096, 4),
        select_backend("auto", device),
    )
    per_row = num_layers * 4 * shape.num_kv_heads * shape.head_dim + 8 * shape.head_dim  # pools written, tables read
    size = (num_layers, num_rows // 64, 64, shape.num_kv_heads, shape.head_dim)
    slots = Slots(torch.arange(num_rows, device=device), *rope_tables(num_rows, shape.head_dim, device), 0)
    for codec in ("int7", "bf16", "fp8", "int4"):
        calls, read = list[Call](), 0
        for seed in range(num_input_sets(num_rows * per_row, device)):
            k, v = torch.empty(2, *size, device=device, dtype=torch.bfloat16)
            caches = [LayerCache(*parts) for parts in zip(k, v, strict=True)]
            chunks = stored_chunks(codec, [num_rows // 8] * 8, num_layers, *shape.heads[1:], device, seed=8 * seed)
            stored = stored_layers(chunks)
            read = stored.data.numel()
            calls.append(partial(backend.load_layers, stored, caches, slots))
        yield Work(
            "load_kv",
            f"{codec}, {num_rows} rows, {num_layers} layers",
            calls,
            "copy",
            num_bytes=per_row * num_rows + read,
        )


def _correction(device: torch.device, tiny: bool) -> Iterator[Work]:
    """The correction of a layer, of chunks of 512 tokens with a sixth or an eighth of them known, and with other
    numbers of warps for the pivots of the inverse."""
    (shape, num_rows, chunk), backend = (
        (TINY, 64, 16) if tiny else (LLAMA_8B, 4096, 512),
        select_backend("auto", device),
    )
    if not backend.has_correction:
        return
    from cacheblend_kernels.triton_backend import correction

    inverse, size = correction.inverse_kernel, (64, shape.num_kv_heads, shape.head_dim)
    starts = torch.arange(0, num_rows + 1, chunk, dtype=torch.int32, device=device)
    prior, rotation = (
        RegressionPrior(2.0, 0.3, (8.0, 30.0), 0.5, 0.1, 0.8),
        rope_tables(num_rows, shape.head_dim, device),
    )
    num_bytes = 12 * num_rows * shape.num_kv_heads * shape.head_dim
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    caches = [LayerCache(*draw(2, num_rows // 64, *size)) for _ in range(num_input_sets(num_bytes, device))]

    def correct(cache: LayerCache, k: Tensor, v: Tensor, rows: Regressed, warps: int) -> None:
        with mock.patch.object(correction, "inverse_kernel") as patched:
            patched.__getitem__.side_effect = lambda grid: (
                lambda *a, **of: inverse[grid](*a, **{**of, "num_warps": warps})
            )
            backend.correct_stale(k, v, cache, rows, rotation, prior, False)

    for share, warps in ((6, 8), (8, 8), (6, 4), (6, 2), (6, 1)):
        known = torch.arange(0, num_rows, share, dtype=torch.int32, device=device)
        known_starts = torch.searchsorted(known, starts, out_int32=True)
        fresh = torch.arange(len(known), device=device)
        rows = Regressed(torch.arange(num_rows, device=device), starts, known, known_starts, fresh, chunk)
        k, v = draw(2, len(known), *size[1:])
        calls = [partial(correct, cache, k, v, rows, warps) for cache in caches]
        case = f"{num_rows} rows, {len(known)} known, {warps} warps for the inverse"
        yield Work("correct_stale", case, calls, "copy", num_bytes=num_bytes)


Family = Callable[[torch.device, bool], Iterator[Work]]
FAMILIES: list[Family] = [_prefill_attention, _decode_attention, _load_kv, _correction]
