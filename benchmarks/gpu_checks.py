"""Every kernel's numbers on a device, in fp16 and bf16, against fp64 on the same inputs.

Outputs start as NaN, and so do the pool's slots that hold no key, so what a kernel forgets to write and what it should
not have read both show. The error of a case is the largest over its rows of |got - want| / |want|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from cacheblend_kernels import KernelBackend, KernelError, select_backend
from gpu_inputs import AttentionInputs, Shape, attention_inputs, rope_tables, scattered_positions, stored_kv
from torch import Tensor

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
EXACT = 0.0
Case = tuple[str, str, float, Callable[[], tuple[Tensor, Tensor]]]  # kernel, case, tolerance, () -> (got, want fp64)


def run_kernel_checks(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Rows {kernel, case, dtype, backend, error, tolerance, ok}; a kernel that raises is a row with `message`."""
    return list(kernel_checks(device, tiny))


def kernel_checks(device: torch.device, tiny: bool, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
    """The rows as they come; of `parts` equal shares of the cases only one."""
    everything = (
        (backend, dtype, case)
        for backend in _backends(device)
        for dtype in (torch.float16, torch.bfloat16)
        for case in _cases(backend, device, dtype, tiny)
    )
    for backend, dtype, (kernel, case, tolerance, run) in islice(everything, part, None, parts):
        row: dict[str, Any] = {"kernel": kernel, "case": case, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"backend": backend.name, "tolerance": tolerance}
        try:
            with _poisoned_outputs():
                got, want = run()
            error = row_error(got, want)
        except Exception as fault:  # a failed launch is a result too: the rest still runs
            yield {**row, "error": float("nan"), "ok": False, "message": f"{type(fault).__name__}: {fault}"}
            continue
        yield {**row, "error": error, "ok": error <= tolerance}


def row_error(got: Tensor, want: Tensor) -> float:
    """Largest |got - want| / |want| over the first dimension; NaN in `got` gives NaN, which passes no comparison."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    error = (got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-30)
    return float(error.nan_to_num(nan=float("inf")).max()) if not got.isnan().any() else float("nan")


@contextmanager
def _poisoned_outputs() -> Iterator[None]:
    """Every tensor a wrapper allocates starts as NaN."""
    kept = torch.empty, torch.empty_like

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

        return call

    torch.empty, torch.empty_like = map(poisoned, kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept


def _backends(device: torch.device) -> list[KernelBackend]:
    names = ("torch", "triton", "xformers") if device.type == "cuda" else ("torch",)
    found = []
    for name in names:
        try:
            found.append(select_backend(name, device))
        except KernelError:
            if name != "xformers":
                raise
    return found


def _cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Case]:
    yield from _attention_cases(backend, device, dtype, tiny)
    yield from _cache_cases(backend, device, dtype)
    yield from _row_cases(backend, device, dtype)


def attention_reference(
    inputs: AttentionInputs,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """fp64 softmax over the keys at or before each row's position, sequence by sequence, [num_rows, num_heads, head_dim]."""
    q, meta = inputs.q.double(), inputs.meta
    block_size, num_kv_heads = inputs.k_cache.shape[1:3]
    out = torch.full_like(q, torch.nan)
    for seq, kv_len in enumerate(meta.kv_lens.tolist()):
        begin, end = meta.cu_rows[seq : seq + 2].tolist()
        blocks = meta.block_table[seq, : -(-kv_len // block_size)].long()
        k, v = (cache[blocks].flatten(0, 1)[:kv_len] for cache in (inputs.k_cache, inputs.v_cache))
        k, v = (
            x.float().double() if s is None else x.float().double() * s.double()[:, None]
            for x, s in ((k, k_scale), (v, v_scale))
        )
        group = q.shape[1] // num_kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        key_pos = torch.arange(kv_len, device=q.device)
        for start in range(begin, end, 512):  # rows x keys in fp64 stay small
            rows = slice(start, min(start + 512, end))
            row_pos = meta.positions[rows, None]
            hidden = key_pos > row_pos
            if window is not None:
                hidden |= key_pos <= row_pos - window
            logits = torch.einsum("rhd,nhd->hrn", q[rows], k) * scale
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)
            out[rows] = torch.einsum("hrn,nhd->rhd", weights, v)
    return out


def _attention_cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[Case]:
    length = 96 if tiny else 1500
    rows = scattered_positions(length, length // 3)
    for heads in ((4, 4), (8, 2), (7, 1), (16, 2), (32, 8)):
        yield _prefill(backend, f"heads {heads}", [rows], [length], heads, 64, device, dtype)
        yield _decode(backend, f"heads {heads}", [length, 1, 65], heads, 64, device, dtype)
    for head_dim in (64, 80, 96, 128, 256):
        yield _prefill(backend, f"head_dim {head_dim}", [rows], [length], (8, 2), head_dim, device, dtype)
        yield _decode(backend, f"head_dim {head_dim}", [length, 17], (8, 2), head_dim, device, dtype)
    for block_size in (16, 64):
        for contiguous in (False, True):
            case = f"block {block_size}{', adjacent' * contiguous}"
            options = {"block_size": block_size, "contiguous": contiguous}
            yield _prefill(backend, case, [rows], [length], (8, 2), 128, device, dtype, **options)
            yield _decode(backend, case, [length], (8, 2), 128, device, dtype, **options)
    for window in (1, 50, 64, 700):
        yield _prefill(backend, f"window {window}", [rows], [length], (8, 2), 128, device, dtype, window=window)
        yield _decode(backend, f"window {window}", [length, 30], (8, 2), 128, device, dtype, window=window)
    for cap, window in ((0.5, None), (30.0, None), (30.0, 50)):
        case = f"soft cap {cap}, window {window}"
        yield _prefill(backend, case, [rows], [length], (8, 2), 256, device, dtype, cap=cap, window=window)
        yield _decode(backend, case, [length, 30], (8, 2), 256, device, dtype, cap=cap, window=window)
    yield _prefill(backend, "float8 pool", [rows], [length], (8, 2), 128, device, dtype, float8=True)
    yield _decode(backend, "float8 pool", [length, 40], (8, 2), 128, device, dtype, float8=True)
    whole = torch.arange(length)
    yield _prefill(backend, "full", [whole], [length], (8, 2), 128, device, dtype, contiguous=True, dense=True)
    yield _prefill(backend, "full, paged", [whole], [length], (8, 2), 128, device, dtype, dense=True)
    yield _prefill(backend, "suffix", [whole[-40:]], [length], (32, 8), 128, device, dtype, dense=True)
    yield _prefill(backend, "one row", [whole[-1:]], [length], (32, 8), 128, device, dtype)
    several = [torch.tensor([0]), rows, torch.tensor([], dtype=torch.int64), whole[:33], torch.tensor([3, 4, 60])]
    lens = [1, length, 5, 33, 64]
    yield _prefill(backend, "several sequences", several, lens, (8, 2), 128, device, dtype)
    many = [1 + (37 * i) % length for i in range(8 if tiny else 64)]
    yield _decode(backend, "many sequences", many, (8, 2), 128, device, dtype)
    if not tiny:
        long = 9000
        wide = scattered_positions(long, 1000, run=7)
        yield _prefill(backend, "long", [wide], [long], (32, 8), 128, device, dtype)
        yield _decode(backend, "long", [long], (32, 8), 128, device, dtype)


def _prefill(
    backend: KernelBackend,
    case: str,
    positions: list[Tensor],
    kv_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    cap: float | None = None,
    float8: bool = False,
    **options: Any,
) -> Case:
    def run() -> tuple[Tensor, Tensor]:
        inputs = attention_inputs(positions, kv_lens, *heads, head_dim, device, dtype=dtype, **options)
        scales = torch.linspace(0.01, 0.03, heads[1], device=device) if float8 else None
        inputs = inputs if scales is None else inputs.to_float8(scales)
        scale = head_dim**-0.5
        got = backend.prefill_attention(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.meta,
            scale=scale,
            sliding_window=window,
            soft_cap=cap,
            k_scale=scales,
            v_scale=scales,
        )
        return got, attention_reference(inputs, scale, window, cap, scales, scales)

    return "prefill_attention", case, TOLERANCE[dtype], run


def _decode(
    backend: KernelBackend,
    case: str,
    kv_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    cap: float | None = None,
    float8: bool = False,
    **options: Any,
) -> Case:
    def run() -> tuple[Tensor, Tensor]:
        positions = [torch.tensor([n - 1]) for n in kv_lens]
        inputs = attention_inputs(positions, kv_lens, *heads, head_dim, device, dtype=dtype, **options)
        scales = torch.linspace(0.01, 0.03, heads[1], device=device) if float8 else None
        inputs = inputs if scales is None else inputs.to_float8(scales)
        scale = head_dim**-0.5
        got = backend.decode_attention(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.meta.block_table,
            inputs.meta.kv_lens,
            scale=scale,
            sliding_window=window,
            soft_cap=cap,
            contiguous_slot=inputs.meta.contiguous_slot,
            max_kv_len=max(kv_lens),
            k_scale=scales,
            v_scale=scales,
        )
        return got, attention_reference(inputs, scale, window, cap, scales, scales)

    return "decode_attention", case, TOLERANCE[dtype], run


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp64 rotate-half RoPE of [num_rows, heads, head_dim]."""
    x, half = x.double(), x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.double()[:, None] + turned * sin.double()[:, None]


def _cache_cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    num_rows, tolerance = 70, TOLERANCE[dtype]
    for head_dim in (64, 80, 96, 128, 256):
        shape = Shape("", 28, 4, head_dim, 0, 0)

        def write(shape: Shape = shape) -> tuple[Tensor, Tensor]:
            fused = torch.randn(num_rows, 36, shape.head_dim, device=device, dtype=dtype)
            q, k, v = fused.split((28, 4, 4), dim=1)
            tables = rope_tables(num_rows, shape.head_dim, device)
            pools, slots = _pools(shape, device, dtype), torch.randperm(128, device=device)[:num_rows]
            out = backend.rope_and_cache(q, k, v, *tables, *pools, slots)
            assert out is not None
            written = [p.view(128, -1)[slots] for p in pools]
            want = (rope_reference(q, *tables), rope_reference(k, *tables), v.double())
            return torch.cat([out.flatten(1), *written], 1), torch.cat([w.flatten(1) for w in want], 1)

        yield "rope_and_cache", f"head_dim {head_dim}", tolerance, write
        for codec in ("bf16", "fp16", "fp8", "int8", "int4"):

            def load(shape: Shape = shape, codec: str = codec) -> tuple[Tensor, Tensor]:
                stored = stored_kv(codec, num_rows, shape, device)
                tables, pools = rope_tables(num_rows, shape.head_dim, device), _pools(shape, device, dtype)
                slots = torch.arange(7, 7 + num_rows, device=device)
                backend.load_kv(
                    cos=tables[0],
                    sin=tables[1],
                    k_cache=pools[0],
                    v_cache=pools[1],
                    slot_mapping=slots,
                    first_slot=7,
                    **stored,
                )
                k, v = decoded(codec, stored, shape.head_dim)
                want = torch.cat((rope_reference(k, *tables).flatten(1), v.flatten(1)), 1)
                return torch.cat([p.view(128, -1)[slots] for p in pools], 1), want

            yield "load_kv", f"{codec}, head_dim {head_dim}", tolerance, load

    def copy() -> tuple[Tensor, Tensor]:
        pools = [torch.randn(9, 64, 4, 128, device=device).to(dtype) for _ in range(4)]
        src, dst = torch.tensor([0, 3, 8], device=device), torch.tensor([5, 1, 2], device=device)
        want = [p.double() for p in pools]
        for w in want:
            w[dst] = w[src]
        backend.copy_blocks(pools, src, dst)
        return torch.stack(pools), torch.stack(want)

    yield "copy_blocks", "4 pools", EXACT, copy


def _pools(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.full((2, 64, shape.num_kv_heads, shape.head_dim), torch.nan, device=device, dtype=dtype) for _ in range(2)
    ]


def decoded(codec: str, stored: dict[str, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of `stored_kv` in fp64."""
    k, v = stored["k"], stored["v"]
    if codec in ("bf16", "fp16"):
        return k.double(), v.double()
    if codec == "fp8":
        return tuple(x.float().double() * stored[f"{p}_scale"].double()[:, None] for p, x in (("k", k), ("v", v)))  # type: ignore[return-value]
    if codec == "int4":
        k, v = (torch.stack((x % 16, x // 16), -1).flatten(-2) for x in (k, v))
    group = torch.arange(k.shape[0], device=k.device) // 32
    wide = {name: t.double() for name, t in stored.items()}
    return k.double() * wide["k_scale"][group] + wide["k_zero"][group], v.double() * wide["v_scale"] + wide["v_zero"]


def _row_cases(backend: KernelBackend, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    tolerance = TOLERANCE[dtype]

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(dtype)

    for kind in ("k", "v", "kv"):

        def deviation(kind: str = kind) -> tuple[Tensor, Tensor]:
            k, v = random(50, 16, 128).split(8, dim=1)
            pools, slots = [random(2, 64, 8, 128) for _ in range(2)], torch.randperm(128, device=device)[:50]
            want = sum(
                (fresh.double() - pool.view(128, 8, 128)[slots].double()).square().sum((1, 2))
                for part, fresh, pool in zip("kv", (k, v), pools, strict=True)
                if part in kind
            )
            assert isinstance(want, Tensor)
            return backend.kv_deviation(k, v, *pools, slots, kind=kind)[:, None], want[:, None]

        yield "kv_deviation", kind, 1e-5, deviation
    for width in (80, 128, 2048, 4096, 8192):

        def norm(width: int = width) -> tuple[Tensor, Tensor]:
            x, residual, weight = random(33, width), random(33, width), random(width)
            kept = residual.clone()
            out, total = backend.add_rms_norm(x, residual, weight, 1e-5)
            wide = total.double()
            want = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            return torch.cat((out, total), 1), torch.cat((want, x.double() + kept.double()), 1)

        def plain_norm(width: int = width) -> tuple[Tensor, Tensor]:
            x, weight = random(33, width), random(width)
            wide = x.double()
            want = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            return backend.rms_norm(x, weight, 1e-5), want

        yield "add_rms_norm", f"width {width}", tolerance, norm
        yield "rms_norm", f"width {width}", tolerance, plain_norm
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
