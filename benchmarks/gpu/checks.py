"""Numbers of every kernel on a device, in fp16 and bf16, against fp64 on the same inputs.

Outputs and pool slots without a key start as NaN, so that missing writes and wrong reads show. The error of a case is
the largest |got - want| / |want| over its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from cacheblend_kernels import AttentionParams, KernelBackend, LayerCache, Slots, select_backend
from gpu.context import Cases, Context, Rows
from gpu.inputs import AttentionInputs, attention_inputs, rope_tables, scattered_positions
from kernel_references import decoded, poisoned_outputs, rope_reference, stored_chunks, stored_layers
from torch import Tensor
from torch.nn import functional

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
FLOAT8 = 2**-4  # half a step of a number with three bits after the first
NUM_ROWS = 70
CODECS = ("bf16", "fp16", "fp8", "int7", "int4")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
Pair = tuple[Tensor, Tensor]  # got, and want in fp64
Case = tuple[str, str, float, Callable[[], Pair]]  # kernel, case, tolerance, run


def cases(context: Context) -> Cases:
    def rows(check: Callable[[], dict[str, Any]]) -> Rows:
        yield "checks", check()
        context.synchronize()

    number, count = context.process
    for name, check in islice(checks_of(context.device, context.tiny), number, None, count):
        yield name, partial(rows, check)


def checks_of(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the name of each case and a function that returns its row."""
    for backend, dtype in product(_backends(device), (torch.float16, torch.bfloat16)):
        for case in Checks(backend, device, dtype, tiny).cases():
            yield f"{case[0]} {case[1]} {dtype} {backend.name}", partial(_check, backend, dtype, case)


def _backends(device: torch.device) -> list[KernelBackend]:
    """Return the backends to check, ours for a GPU first."""
    names = ("triton", "torch") if device.type == "cuda" else ("torch",)
    return [select_backend(name, device) for name in names]


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


def attention_reference(inputs: AttentionInputs, params: AttentionParams) -> Tensor:
    """Return fp64 softmax attention over the keys up to each row's position, per sequence, [num_rows, num_heads,
    head_dim]."""
    q, meta, cache = inputs.q.double(), inputs.meta, inputs.cache
    out = torch.full_like(q, torch.nan)
    for seq, kv_len in enumerate(meta.kv_lens.tolist()):
        begin, end = meta.cu_rows[seq : seq + 2].tolist()
        blocks = meta.block_table[seq, : -(-kv_len // cache.k.shape[1])].long()
        group = q.shape[1] // cache.k.shape[2]
        k, v = (
            values[:kv_len].repeat_interleave(group, 1)
            for values in _values(cache, lambda p, at=blocks: p[at].flatten(0, 1))
        )
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


def _values(cache: LayerCache, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return what a selection of a pool holds of K and of V, [n, num_kv_heads, head_dim] in fp64."""
    parts = [(of(pool).float().double(), s) for pool, s in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))]
    return [values if scale is None else values * scale.double()[:, None] for values, scale in parts]


@dataclass(frozen=True)
class Checks:
    """The cases of a backend in a dtype."""

    backend: KernelBackend
    device: torch.device
    dtype: torch.dtype
    tiny: bool

    def cases(self) -> Iterator[Case]:
        yield from self.attention_cases()
        yield from self.cache_cases()
        yield from self.row_cases()
        if self.backend.has_attention_peaks:
            for heads, dim, float8 in product(((32, 8), (7, 1)), (64, 80, 128, 256), (False, True)):
                case = f"heads {heads}, head_dim {dim}{', float8 pool' * float8}"
                yield "attention_peaks", case, TOLERANCE[self.dtype], partial(self.peaks, heads, dim, float8)

    def inputs(self, positions: list[Tensor], lens: list[int], heads: tuple[int, int], dim: int, **options: Any) -> Any:
        float8 = options.pop("float8", False)
        made = attention_inputs(positions, lens, *heads, dim, self.device, dtype=self.dtype, **options)
        return made.to_float8(*self.pool_scales(heads[1])) if float8 else made

    def pool_scales(self, num_kv_heads: int) -> Pair:
        """Return scales of a float8 pool; K's and V's differ, so that swapped ones show."""
        k, v = (torch.linspace(*ends, num_kv_heads, device=self.device) for ends in ((0.01, 0.03), (0.05, 0.02)))
        return k, v

    def peaks(self, heads: tuple[int, int], dim: int, float8: bool) -> Pair:
        length = 96 if self.tiny else 3000
        inputs = self.inputs([torch.arange(length)[-40:]], [length], heads, dim, float8=float8)
        params, cache, meta = AttentionParams(dim**-0.5), inputs.cache, inputs.meta
        peaks = torch.zeros(length, device=self.device)
        self.backend.attention_peaks(inputs.q, meta.positions, cache, meta, params, peaks)
        k = _values(cache, lambda pool: pool[meta.block_table[0].long()].flatten(0, 1)[:length])[0]
        weights = _weights(inputs.q.double(), k.repeat_interleave(heads[0] // heads[1], 1), meta.positions, params)
        return peaks[None], weights.amax((0, 1))[None]

    def attention(
        self, kernel: str, case: str, positions: list[Tensor], lens: list[int], heads: tuple[int, int], dim: int = 128,
        window: int | None = None, cap: float | None = None, **options: Any,
    ) -> Case:  # fmt: skip
        def run() -> Pair:
            inputs = self.inputs(positions, lens, heads, dim, **options)
            params = AttentionParams(dim**-0.5, window, cap)
            got = getattr(self.backend, kernel)(inputs.q, inputs.cache, inputs.meta, params)
            return got, attention_reference(inputs, params)

        return kernel, case, TOLERANCE[self.dtype], run

    def attention_cases(self) -> Iterator[Case]:
        prefill, length = partial(self.attention, "prefill_attention"), 96 if self.tiny else 1500
        rows, whole = scattered_positions(length, length // 3), torch.arange(length)

        def decode(case: str, lens: list[int], *shape: Any, **options: Any) -> Case:
            return self.attention(
                "decode_attention", case, [torch.tensor([n - 1]) for n in lens], lens, *shape, **options
            )

        for heads in ((4, 4), (8, 2), (7, 1), (16, 2), (32, 8)):
            yield prefill(f"heads {heads}", [rows], [length], heads, 64)
            yield decode(f"heads {heads}", [length, 1, 65], heads, 64)
        for head_dim in (64, 80, 96, 128, 256):
            yield prefill(f"head_dim {head_dim}", [rows], [length], (8, 2), head_dim)
            yield decode(f"head_dim {head_dim}", [length, 17], (8, 2), head_dim)
        for block_size, contiguous in product((16, 64), (False, True)):
            case = f"block {block_size}{', adjacent' * contiguous}"
            options = {"block_size": block_size, "contiguous": contiguous}
            yield prefill(case, [rows], [length], (8, 2), **options)
            yield decode(case, [length], (8, 2), **options)
        for window in (1, 50, 64, 700):
            yield prefill(f"window {window}", [rows], [length], (8, 2), window=window)
            yield decode(f"window {window}", [length, 30], (8, 2), window=window)
        for cap, cut in ((0.5, None), (30.0, None), (30.0, 50)):
            case = f"soft cap {cap}, window {cut}"
            yield prefill(case, [rows], [length], (8, 2), 256, cap=cap, window=cut)
            yield decode(case, [length, 30], (8, 2), 256, cap=cap, window=cut)
        yield prefill("float8 pool", [rows], [length], (8, 2), float8=True)
        yield decode("float8 pool", [length, 40], (8, 2), float8=True)
        yield prefill("full", [whole], [length], (8, 2), contiguous=True)
        yield prefill("full, paged", [whole], [length], (8, 2))
        yield prefill("suffix", [whole[-40:]], [length], (32, 8))
        yield prefill("one row", [whole[-1:]], [length], (32, 8))
        several = [torch.tensor([0]), rows, torch.tensor([], dtype=torch.int64), whole[:33], torch.tensor([3, 4, 60])]
        yield prefill("several sequences", several, [1, length, 5, 33, 64], (8, 2))
        yield decode("many sequences", [1 + (37 * i) % length for i in range(8 if self.tiny else 64)], (8, 2))
        if not self.tiny:
            yield prefill("long", [scattered_positions(9000, 1000, run=7)], [9000], (32, 8))
            yield decode("long", [9000], (32, 8))

    def cache_cases(self) -> Iterator[Case]:
        for dim, float8 in (*product((64, 80, 96, 128, 256), (False,)), (80, True), (128, True)):
            case, tolerance = f"head_dim {dim}{', float8 pool' * float8}", FLOAT8 if float8 else TOLERANCE[self.dtype]
            yield "rope_and_cache", case, tolerance, partial(self.write, dim, float8)
            for codec, run in product(CODECS, (True, False) if dim in (80, 128) else (True,)):
                name = f"{codec}, {case}, {'adjacent slots' if run else 'a slot mapping'}"
                yield "load_kv", name, tolerance, partial(self.load, dim, codec, run, float8)
        for dim in (64, 80, 128):
            yield "rope", f"head_dim {dim}", TOLERANCE[self.dtype], partial(self.rotate, dim)

    def rotate(self, dim: int) -> Pair:
        x, tables = self.random(NUM_ROWS, 36, dim)[:, :28], rope_tables(NUM_ROWS, dim, self.device)
        return self.backend.rope(x, *tables), rope_reference(x, *tables)

    def write(self, dim: int, float8: bool) -> Pair:
        """Run rope_and_cache; return rotated q with the slots' contents, and the reference."""
        q, k, v = self.random(NUM_ROWS, 36, dim).split((28, 4, 4), dim=1)
        tables, slots = rope_tables(NUM_ROWS, dim, self.device), torch.randperm(128, device=self.device)[:NUM_ROWS]
        cache = self.pools(dim, float8)
        out = self.backend.rope_and_cache(q, k, v, cache, Slots(slots, *tables))
        assert out is not None
        want = rope_reference(q, *tables).flatten(1), *_clamped(rope_reference(k, *tables), v.double(), cache)
        return torch.cat([out.flatten(1), *_held(cache, slots)], 1), torch.cat(want, 1)

    def load(self, dim: int, codec: str, run: bool, float8: bool) -> Pair:
        """Load three chunks at two layers; return the slots' contents and their reference. run: slots are adjacent, and
        no slot mapping is read."""
        device, lengths = self.device, (40, NUM_ROWS - 41, 1)
        chunks = stored_chunks(codec, lengths, 2, 4, dim, device)
        tables, one = rope_tables(NUM_ROWS, dim, device), self.pools(dim, float8)
        parts = [torch.stack([part, part]) for part in vars(one).values() if part is not None]
        caches = [LayerCache(*(part[layer] for part in parts)) for layer in range(2)]
        slots = torch.arange(7, 7 + NUM_ROWS, device=device) if run else torch.randperm(128, device=device)[:NUM_ROWS]
        where = Slots(torch.full_like(slots, -1), *tables, 7) if run else Slots(slots, *tables)
        self.backend.load_layers(stored_layers(chunks), caches, where)
        found, wanted = list[Tensor](), list[Tensor]()
        for layer, cache in enumerate(caches):
            k, v = (torch.cat(part) for part in zip(*(decoded(chunk[layer], dim) for chunk in chunks), strict=True))
            found += _held(cache, slots)
            wanted += _clamped(rope_reference(k, *tables), v, cache)
        return torch.cat(found, 1), torch.cat(wanted, 1)

    def pools(self, dim: int, float8: bool) -> LayerCache:
        """Return a pool of 128 slots with 4 heads, filled with NaN."""
        dtype = torch.float8_e4m3fn if float8 else self.dtype
        pools = [torch.full((2, 64, 4, dim), torch.nan, device=self.device).to(dtype) for _ in range(2)]
        return LayerCache(*pools, *(self.pool_scales(4) if float8 else ()))

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device).to(self.dtype)

    def row_cases(self) -> Iterator[Case]:
        tolerance = TOLERANCE[self.dtype]
        for kind, float8 in product(("k", "v", "kv"), (False, True)):
            yield "kv_deviation", f"{kind}{', float8 pool' * float8}", 1e-5, partial(self.deviation, kind, float8)
        for width in (80, 128, 2048, 4096, 8192):
            yield "add_rms_norm", f"width {width}", tolerance, partial(self.add_norm, width)
            yield "rms_norm", f"width {width}", tolerance, partial(self.norm, (33, width), width)
        for heads, dim in ((28, 128), (4, 80)):  # QK-norm: heads of a fused projection
            yield (
                "rms_norm",
                f"{heads} strided heads of {dim}",
                tolerance,
                partial(self.norm, (33, heads + 8, dim), heads),
            )
        for name in ACTIVATIONS:
            yield "act_and_mul", name, tolerance, partial(self.activate, name)

    def deviation(self, kind: str, float8: bool) -> Pair:
        k, v = self.random(50, 16, 128).split(8, dim=1)
        pools, slots = [self.random(2, 64, 8, 128) for _ in range(2)], torch.randperm(128, device=self.device)[:50]
        cache = LayerCache(*pools)
        if float8:
            pools = [(20 * p.float()).to(torch.float8_e4m3fn) for p in pools]
            cache = LayerCache(*pools, *self.pool_scales(8))
        olds = _values(cache, lambda pool: pool.view(128, 8, 128)[slots])
        parts = [(fresh.double() - old).square().sum((1, 2)) for fresh, old in zip((k, v), olds, strict=True)]
        want = torch.stack([part for name, part in zip("kv", parts, strict=True) if name in kind]).sum(0)
        return self.backend.kv_deviation(k, v, cache, slots, kind)[:, None], want[:, None]

    def add_norm(self, width: int) -> Pair:
        x, residual, weight = self.random(33, width), self.random(33, width), self.random(width)
        before = residual.clone()
        out, total = self.backend.add_rms_norm(x, residual, weight, 1e-5)
        return torch.cat((out, total), 1), torch.cat((_norm(total, weight), x.double() + before.double()), 1)

    def norm(self, size: tuple[int, ...], count: int) -> Pair:
        """Normalise the first `count` of the second dimension."""
        x, weight = self.random(*size)[:, :count], self.random(size[-1])
        return self.backend.rms_norm(x, weight, 1e-5), _norm(x, weight)

    def activate(self, name: str) -> Pair:
        gate_up = 3 * self.random(40, 2 * 1100)
        gate, up = gate_up.double().chunk(2, -1)
        return self.backend.act_and_mul(gate_up, name), ACTIVATIONS[name](gate) * up


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def _clamped(k: Tensor, v: Tensor, cache: LayerCache) -> list[Tensor]:
    """Return fp64 K and V [num_rows, 4, head_dim] within the range of the pool, flat."""
    most = [None if s is None else 448 * s.double()[:, None] for s in (cache.k_scale, cache.v_scale)]
    return [
        (x if m is None else torch.minimum(torch.maximum(x, -m), m)).flatten(1)
        for x, m in zip((k, v), most, strict=True)
    ]


def _held(cache: LayerCache, slots: Tensor) -> list[Tensor]:
    """Return K and V of the slots, [num_rows, 4 * head_dim] each."""
    return [values.flatten(1) for values in _values(cache, lambda pool: pool.view(128, 4, -1)[slots])]
