"""From the question to the answer with random weights at a model's shape: time to the first token of transformers, of our
full prefill and of the blend from a warm store, loading alone, and decoding with and without graphs, every time beside the
cost model's floor (`gpu_cost.py`).
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cacheblend_store.format.codecs import decode_kv, view_kv
from gpu_bench import BLOCK_SIZE, FULL, TINY, Bench, HostMeter, Loaded, Scenario
from gpu_budget import Budget
from gpu_checks import TOLERANCE, rope_reference, row_error
from gpu_cost import Ceilings, decode_floor, decode_weight_bytes, prefill_floor, prefill_flops
from gpu_model import random_model, read_config
from torch import Tensor

from cacheblend_cli.runtime.ask import Prefilled
from cacheblend_cli.runtime.config import BlendConfig
from cacheblend_cli.runtime.decode import DecodeRunner
from cacheblend_cli.runtime.generate import Continuation, Generation, generate
from cacheblend_cli.runtime.memory import reserve
from cacheblend_cli.runtime.sampling import SamplingParams

__all__ = ["FULL", "TINY", "Scenario", "measure_end_to_end"]

RATIOS = (0.0, 0.05, 0.10, 0.15, 0.20, 1.0)
LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def measure_end_to_end(
    name: str,
    scenario: Scenario,
    device: torch.device,
    measured: dict[str, Any],
    folder: Path,
    budget: Budget,
    faults: list[str],
) -> dict[str, Any]:
    """One model: {model, times: [...], decode: [...], load: [...], checks: [...], ...}; rows are plain dicts.

    measured: what `measure_ceilings` returned. folder: where the store goes. What the budget has no time for is left out
    and said there; what raises is left out and told in `faults`.
    """
    _free(device)  # what a model before this one left behind, had it failed
    model = random_model(name, read_config(name), device, scenario.dtype)
    start = time.perf_counter()
    meter = None if device.type == "cuda" else HostMeter()
    memory = reserve(model.decoder, BLOCK_SIZE, scenario.utilization, eager=True, meter=meter)
    assert memory is not None
    warm_up = time.perf_counter() - start
    with Bench(model, memory, scenario, Ceilings.of(measured), folder, budget) as bench:
        result: dict[str, Any] = {
            "model": name,
            "dtype": str(scenario.dtype).removeprefix("torch."),
            "backend": model.decoder.kernels.name,
            "warm_up_s": warm_up,
            "pool_tokens": memory.num_tokens,
            "precompute": bench.fill(),
            "times": [],
            "load": [],
            "decode": [],
            "checks": [],
        }
        for length in scenario.lengths:
            if not budget.allows(6 if device.type == "cuda" else 0, f"{name} at N={length}"):
                continue
            for measure in (checks, times, load, decode):
                try:
                    result[measure.__name__] += measure(bench, length)
                except Exception as error:  # the others still have something to say
                    traceback.print_exc()
                    faults.append(f"{name} N={length}, {measure.__name__}: {type(error).__name__}: {error}")
    del bench, memory, model
    _free(device)
    return result


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def times(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Time to the first token of every case, in turn, so that all see the same machine."""
    cases: dict[str, Callable[[], tuple[float, Any]]] = {
        "full": partial(bench.run, length, BlendConfig(mode="full")),
        "transformers": partial(bench.run_theirs, length),
    }
    for ratio in RATIOS:
        cases[f"blend {ratio:.2f}"] = partial(bench.run, length, BlendConfig(ratio=ratio, selector="hkvd"))
    seconds: dict[str, list[float]] = {}
    stalls: dict[str, list[tuple[float, float]]] = {}
    done: dict[str, Prefilled] = {}
    what = f"{bench.model.name} N={length}"
    for name, case in cases.items():  # compiles kernels, and tells what a run takes
        start = time.perf_counter()
        case()
        if bench.budget.allows(2 * (time.perf_counter() - start), f"{what} {name}"):
            seconds[name], stalls[name] = [], []
    for _ in range(bench.scenario.reps):
        round_s = sum(max(found, default=0.0) for found in seconds.values())
        if not bench.budget.allows(round_s, f"one more round of {what}"):
            break
        for name in seconds:
            taken, what_it_did = cases[name]()
            seconds[name].append(taken)
            if isinstance(what_it_did, Prefilled):
                done[name] = what_it_did
                stalls[name].append((what_it_did.loader.load_s, what_it_did.loader.stall_s))
    rows = []
    for name, found in seconds.items():
        if found:
            rows.append(_time_row(bench, length, name, found, stalls[name], done))
    full = next((row for row in rows if row["case"] == "full"), None)
    for row in rows:
        if full is not None and row is not full:
            row["speedup"] = full["seconds"] / row["seconds"]
            row["speedup_ceiling"] = full["floor_s"] / row["floor_s"]
    return rows


def _time_row(
    bench: Bench,
    length: int,
    name: str,
    seconds: list[float],
    stalls: list[tuple[float, float]],
    done: dict[str, Prefilled],
) -> dict[str, Any]:
    """transformers does the work of our full prefill."""
    median = statistics.median(seconds)
    own = done.get(name, done.get("full"))
    row: dict[str, Any] = {"length": length, "case": name, "seconds": median, "all_seconds": seconds}
    if own is not None:
        spec, size = bench.model.spec, bench.scenario.suffix
        kv_bytes = own.loader.num_bytes
        row["floor_s"] = prefill_floor(spec, length, size, own.result.layers, kv_bytes, bench.ceilings)
        row["share"] = row["floor_s"] / median
        row["tflop_s"] = prefill_flops(spec, length, size, own.result.layers) / median / 1e12
        row["kv_bytes"] = kv_bytes
        row["chosen"] = len(own.result.chosen)
    if stalls and own is not None and own.loader.num_bytes:
        row["load_s"] = statistics.median(load for load, _ in stalls)
        row["load_gb_s"] = own.loader.num_bytes / row["load_s"] / 1e9
        row["stall_s"] = statistics.median(stall for _, stall in stalls)
    return row


def load(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Store (page cache) to pool, every byte verified, with nothing computed beside it."""
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
    """Tokens a second of one sequence after the prompt, the tool's own loop, with graphs and without."""
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
    done = bench.prefill(length, BlendConfig(mode="full"), room=num_tokens)
    try:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        return generate(bench.runtime, Continuation.of(done), params, runner=runner)
    finally:
        done.sequence.release()


def checks(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Rows like those of `run_kernel_checks`: what the whole path gives beside what it must give."""
    allowed = LOGITS_TOLERANCE[bench.scenario.dtype]
    full = bench.run(length, BlendConfig(mode="full"))[1].result.logits
    found = {
        "full prefill beside transformers'": (full, bench.run_theirs(length)[1][None]),
        "blend at ratio 1 beside full prefill": (
            bench.run(length, BlendConfig(ratio=1.0, selector="hkvd"))[1].result.logits,
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
    """Everything before the suffix is exact, so nothing is left to repair."""
    logits, first = [], bench.inputs(length, exact=True)[:1]
    for mode in ("reuse", "full"):
        done = bench.prefill(length, BlendConfig(mode=mode), first)
        logits.append(done.result.logits)
        done.sequence.release()
    return logits[0], logits[1]


@torch.inference_mode()
def _pool_error(bench: Bench, length: int) -> float:
    """What the loader wrote, a few layers of every chunk, beside the same bytes decoded and rotated in fp64."""
    spec, rope = bench.model.spec, bench.model.decoder.rope
    worst = 0.0
    with Loaded(bench, length) as loaded, bench.store.read() as reader:
        for layer in sorted({0, spec.num_layers // 2, spec.num_layers - 1}):
            for segment in (s for s in loaded.plan.segments if s.cached):
                assert segment.key is not None
                count = segment.end - segment.start
                shape = (count, spec.num_kv_heads, spec.head_dim)
                k, v = decode_kv(
                    view_kv(reader.layer(reader.undamaged(segment.key), layer), bench.collection.codec, *shape)
                )
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
