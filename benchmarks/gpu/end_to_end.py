"""From question to answer with random weights at a model's shape: time to the first token of transformers, full prefill
and the blend from a warm store, loading alone, and decoding with and without graphs, each against the cost model's
floor (`cost.py`).
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from cacheblend_store.format.codecs import decode_kv, view_kv
from gpu.bench import BLOCK_SIZE, FULL, TINY, Bench, HostMeter, Loaded, Scenario
from gpu.checks import TOLERANCE, rope_reference, row_error
from gpu.cost import Ceilings, Work, decode_floor, decode_weight_bytes, prefill_floor, prefill_flops
from gpu.model import random_model, read_config
from gpu.steps import Cases, Context, Rows
from gpu.timing import profile
from torch import Tensor

from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.measured_prefill import Prefilled
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.worker.decode import DecodeRunner
from cacheblend_cli.engine.worker.memory import reserve
from cacheblend_cli.types import BlendParams, LayerReport, LayerStatus, SamplingParams

IN_POOL = "blend 0.15 in the pool"  # nothing is loaded
PLAIN = "query 0.15 uncorrected"  # "query 0.15" is the default; the difference is the cost of its correction
FEW = ("full", "blend 0.15", "query 0.15", "transformers")
FIRST = ("full", "blend 0.15", "query 0.15", PLAIN, IN_POOL, "transformers")
REST = ("query 0.05", "blend 0.00", "blend 0.05", "blend 0.10", "blend 0.20", "blend 1.00")
EVERY_CASE = ("llama-3.1-8b", "tiny, every case")  # steps that also measure REST
LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def cases(context: Context) -> Cases:
    """Yield the cases of one model. The first gives {model, warm_up_s, ...}, the others rows of "times", "load",
    "decode" and "path"."""
    scenario = TINY if context.tiny else FULL
    bench = prepare(context, scenario)
    every = context.step in EVERY_CASE
    with bench.bench:
        yield "preparation", lambda: iter([("model", bench.told)])
        yield from bench_cases(bench.bench, FIRST if every else FEW, scenario.lengths)
        for length in scenario.lengths:
            for part, measure in (("path", checks), ("load", load), ("decode", decode)):
                yield f"N={length} {part}", partial(_rows, part, measure, bench.bench, length)
        if every:
            yield from bench_cases(bench.bench, REST, scenario.lengths)


@dataclass(frozen=True)
class Prepared:
    """A bench with its prompts. told: the model's part of the result."""

    bench: Bench
    told: dict[str, Any]


def prepare(context: Context, scenario: Scenario) -> Prepared:
    """Create a model with random weights on the device, and a store with the KV of its prompts."""
    device, name = context.device, "tiny" if context.tiny else context.step
    model = random_model(name, read_config(name), device, scenario.dtype)
    start = time.perf_counter()
    meter = None if device.type == "cuda" else HostMeter()
    config = EngineConfig(block_size=BLOCK_SIZE, gpu_memory_utilization=scenario.utilization, eager=True)
    memory = reserve(model.decoder, config, meter=meter)
    warm_up = time.perf_counter() - start
    shutil.rmtree(context.folder / f"{name}-store", ignore_errors=True)  # left by a process that died
    bench = Bench(model, memory, scenario, Ceilings.of(context.ceilings()), context.folder, context.budget)
    told = {
        "model": name,
        "dtype": str(scenario.dtype).removeprefix("torch."),
        "backend": model.decoder.kernels.name,
        "warm_up_s": warm_up,
        "pool_tokens": memory.num_tokens,
        "precompute": bench.fill(),
    }
    return Prepared(bench, told)


def bench_cases(bench: Bench, names: Sequence[str], lengths: Sequence[int]) -> Cases:
    for length in lengths:
        for name in names:
            yield f"N={length} {name}", partial(_rows, "times", partial(times, name=name), bench, length)
            if bench.device.type == "cuda":
                yield (
                    f"N={length} {name}, profiled",
                    partial(_rows, "profiles", partial(profiled, name=name), bench, length),
                )


def _rows(part: str, measure: Callable[[Bench, int], list[dict[str, Any]]], bench: Bench, length: int) -> Rows:
    for row in measure(bench, length):
        yield part, row


def times(bench: Bench, length: int, name: str) -> list[dict[str, Any]]:
    """Return time to the first token of one case: the median of several runs after one that compiles."""
    run = _case(bench, length, name)
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    seconds: list[float] = []
    stalls: list[tuple[float, float]] = []
    done = None
    for _ in range(bench.scenario.reps):
        if seconds and not bench.budget.allows(once, f"one more run of {bench.model.name} N={length} {name}"):
            break
        taken, done = run()
        seconds.append(taken)
        if isinstance(done, Prefilled):
            stalls.append((done.loader.load_s, done.loader.stall_s))
    median, spec = statistics.median(seconds), bench.model.spec
    work = _work(bench, length, name, done)
    row: dict[str, Any] = {"length": length, "case": name, "seconds": median, "all_seconds": seconds}
    row["floor_s"] = prefill_floor(spec, work, bench.ceilings)
    row["share"] = row["floor_s"] / median
    row["tflop_s"] = prefill_flops(spec, work) / median / 1e12
    row["kv_bytes"] = work.kv_bytes
    row["chosen"] = 0 if isinstance(done, Tensor) or done is None else len(_result(done).chosen)
    if stalls and work.kv_bytes:
        row["load_s"] = statistics.median(load for load, _ in stalls)
        row["load_gb_s"] = work.kv_bytes / row["load_s"] / 1e9
        row["stall_s"] = statistics.median(stall for _, stall in stalls)
    return [row]


def profiled(bench: Bench, length: int, name: str) -> list[dict[str, Any]]:
    return [{"length": length, "case": name, **profile(_case(bench, length, name))}]


Done = Prefilled | PrefillResult | Tensor


def _case(bench: Bench, length: int, name: str) -> Callable[[], tuple[float, Done]]:
    if name == "full":
        return partial(bench.run, length, BlendParams(mode="full"))
    if name == "transformers":
        return partial(bench.run_theirs, length)
    if name == IN_POOL:
        return partial(bench.run_in_pool, length, _blend(name))
    return partial(bench.run, length, _blend(name))


def _blend(name: str) -> BlendParams:
    kind, ratio, *more = name.split()
    blend = BlendParams(ratio=float(ratio), selector="hkvd" if kind == "blend" else kind)
    return replace(blend, correction="none") if more == ["uncorrected"] else blend


def _result(done: Prefilled | PrefillResult) -> PrefillResult:
    return done.result if isinstance(done, Prefilled) else done


def _work(bench: Bench, length: int, name: str, done: Done | None) -> Work:
    """Return the work of a case; transformers does that of our full prefill."""
    spec, suffix = bench.model.spec, bench.scenario.suffix
    if done is None or isinstance(done, Tensor):
        return Work(
            length, suffix, [LayerReport(i, LayerStatus.AFTER_CHECK, length, 0) for i in range(spec.num_layers)]
        )
    kv_bytes = done.loader.num_bytes if isinstance(done, Prefilled) else 0
    probed = policy_of(_blend(name), spec.num_layers, True).probe_layers if name.startswith("query") else ()
    return Work(length, suffix, _result(done).layers, kv_bytes, probed)


def load(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Measure store (page cache) to pool, with digests checked and nothing else running."""
    found = []
    for _ in range(1 + bench.scenario.reps):
        start = time.perf_counter()
        with Loaded(bench, length) as loaded:
            bench.synchronize()
            found.append(time.perf_counter() - start)
    seconds = statistics.median(found[1:])
    speed, ceiling = loaded.num_bytes / seconds / 1e9, bench.ceilings.bus / 1e9
    row = {"length": length, "bytes": loaded.num_bytes, "seconds": seconds, "gb_s": speed}
    return [{**row, "ceiling_gb_s": ceiling, "share": speed / ceiling}]


def decode(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Measure decoded tokens per second of one sequence, by the tool's loop, with graphs and without."""
    decoder = bench.model.decoder
    num_tokens, itemsize = bench.scenario.decode_tokens, decoder.dtype.itemsize
    weights = decode_weight_bytes(bench.model.spec, itemsize)
    floor = decode_floor(bench.model.spec, weights, length + num_tokens / 2, itemsize, bench.ceilings)
    rows, answers = [], {}
    for name, runner in bench.runners.items():
        if not bench.budget.allows(4 * floor * num_tokens, f"{bench.model.name} decoding at {length} with {name}"):
            continue
        found = [_generate(bench, length, runner) for _ in range(3)]  # the first captures the graph
        answers[name] = found[-1].token_ids
        speed = statistics.median(one.tokens_per_s for one in found[1:])
        row = {"length": length, "case": name, "tokens_per_s": speed, "floor_s": floor, "share": floor * speed}
        rows.append({**row, "weight_bound_share": weights / bench.ceilings.memory * speed})
    if len(answers) == 2:
        alike = sum(a == b for a, b in zip(*answers.values(), strict=True))
        rows[-1]["tokens_like_eager"] = alike / num_tokens
    return rows


def _generate(bench: Bench, length: int, runner: DecodeRunner) -> Generation:
    num_tokens = bench.scenario.decode_tokens
    done = bench.prefill(length, BlendParams(mode="full"), headroom=num_tokens)
    try:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        return done.answer(params, runner=runner)
    finally:
        done.sequence.release()


def checks(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Rows like those of `checks_of`: errors of the whole path against its references."""
    allowed = LOGITS_TOLERANCE[bench.scenario.dtype]
    full = bench.run(length, BlendParams(mode="full"))[1].result.logits
    found = {
        "full prefill beside transformers'": (full, bench.run_theirs(length)[1][None]),
        "blend at ratio 1 beside full prefill": (
            bench.run(length, BlendParams(ratio=1.0, selector="hkvd"))[1].result.logits,
            full,
        ),
        "prefix and one chunk from the store beside full prefill": _one_chunk(bench, length),
    }
    rows = [_check(bench, length, case, row_error(*pair), allowed) for case, pair in found.items()]
    loaded = TOLERANCE.get(bench.scenario.dtype, 1e-5)
    return [*rows, _check(bench, length, "stored KV in the pool", _pool_error(bench, length), loaded)]


def _check(bench: Bench, length: int, case: str, error: float, tolerance: float) -> dict[str, Any]:
    row = {"model": bench.model.name, "length": length, "case": case, "error": error, "tolerance": tolerance}
    if not error <= tolerance:
        print(f"  FAIL {bench.model.name} N={length} {case}: {error:.2e} > {tolerance:.0e}", file=sys.stderr)
    return {**row, "ok": error <= tolerance}


def _one_chunk(bench: Bench, length: int) -> tuple[Tensor, Tensor]:
    """Return the logits of reuse and of full prefill for a prompt of one chunk, which is exact."""
    logits, first = [], bench.chunks_of(length, exact=True)[:1]
    for mode in ("reuse", "full"):
        done = bench.prefill(length, BlendParams(mode=mode), first)
        logits.append(done.result.logits)
        done.sequence.release()
    return logits[0], logits[1]


@torch.inference_mode()
def _pool_error(bench: Bench, length: int) -> float:
    """Return the error of loaded KV, for a few layers of every chunk, against the same bytes decoded and rotated in
    fp64."""
    spec, rope = bench.model.spec, bench.model.decoder.rope
    worst = 0.0
    with Loaded(bench, length) as loaded, bench.store.read() as reader:
        for layer in sorted({0, spec.num_layers // 2, spec.num_layers - 1}):
            for segment in (s for s in loaded.plan.segments if s.cached):
                assert segment.key is not None
                count = segment.end - segment.start
                shape = (count, spec.num_kv_heads, spec.head_dim)
                parts = reader.layer(reader.undamaged(segment.key), layer)
                k, v = decode_kv(view_kv(parts, bench.collection.codec, *shape), bench.collection.codec)
                positions = torch.arange(segment.start, segment.end, device=bench.device)
                tables = rope.cos_sin(positions, length)[rope.of_layer[layer]]
                slots = loaded.sequence.slots(positions)
                wanted = rope_reference(k.to(bench.device), *tables), v.to(bench.device)
                cache = bench.memory.pool.layers[layer]
                for pool, want in zip((cache.k, cache.v), wanted, strict=True):
                    got = pool.view(-1, *shape[1:])[slots]
                    worst = max(worst, row_error(got, want), key=_nan_first)
    return worst


def _nan_first(error: float) -> float:
    return float("inf") if error != error else error
