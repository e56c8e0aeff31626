"""From question to answer with random weights at a model's shape: time to the first token of full prefill, of the blend
from a warm store and of transformers, loading alone, and decoding, beside what the cost model expects (`cost.py`).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any
from unittest import mock

import torch
from decoded import read_kv
from gpu.bench import BLOCK_SIZE, FULL, TINY, Bench, HostMeter, Loaded
from gpu.checks import TOLERANCE, rope_reference, row_error
from gpu.context import Cases, Context, Rows
from gpu.cost import Ceilings, decode_floor, expected_s
from gpu.model import random_model, read_config, transformers_model
from gpu.plan import LARGE
from gpu.profiles import profile, stamps
from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.core import EngineCore, Features
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.events import Failed, Limits
from cacheblend_cli.engine.features.speculation import Speculation
from cacheblend_cli.engine.measured_prefill import Prefilled
from cacheblend_cli.engine.worker.decode import EagerRunner
from cacheblend_cli.engine.worker.memory import reserve
from cacheblend_cli.kv import loader
from cacheblend_cli.types import BlendParams, SamplingParams

PREFILLS = (
    "full",
    "query 0.15",  # the default
    "hkvd 0.15",
    "query 0.15 uncorrected",  # the difference is the cost of the correction
    "hkvd 0.15 uncorrected",
    "query 0.15 in the pool",  # nothing is loaded
    "hkvd 0.15 in the pool",
    "query 0.15 from the store",  # not from the host cache
    "query 0.15 without graphs",
)
THEIRS = "transformers"
WITHOUT_CACHE, WITHOUT_GRAPHS = " from the store", " without graphs"
FEW = ("full", "query 0.15", "hkvd 0.15")
PROFILED = (*FEW, "query 0.15 in the pool")
THREADS = (1, 2, 4, 8)  # that load
LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
LOSSY = 0.1  # tolerance of logits over KV in few bits
WARM_STEPS = 4  # of decoding: they capture the graph
PROPOSED = 4  # tokens beside each step


def cases(context: Context) -> Cases:
    """Yield the cases of one model."""
    scenario = TINY if context.tiny else FULL
    with context.slow("model"):
        bench = prepare(context)
    first, *longer = scenario.lengths
    complete = context.step == LARGE
    with bench:
        for length in (first, *longer) if complete else (first,):
            yield from length_cases(context, bench, length, PREFILLS if complete else FEW)


def length_cases(context: Context, bench: Bench, length: int, prefills: tuple[str, ...]) -> Cases:
    def case(name: str, part: str, measure: Callable[[], list[dict[str, Any]]]) -> tuple[str, Callable[[], Rows]]:
        def rows() -> Rows:
            if name not in ("full", THEIRS) and not bench.is_filled(length):
                with context.slow("precompute"):
                    yield "load", {"case": "precompute", **bench.fill(length)}
            if THEIRS in name and bench.twin is None:
                with context.slow("transformers"):
                    bench.twin = transformers_model(bench.model)
            for row in measure():
                yield part, row

        return f"N={length} {name}", rows

    for name in (*prefills, THEIRS):
        yield case(name, "times", partial(times, bench, length, name))
    for name in filter(prefills.__contains__, PROFILED):
        if bench.device.type == "cuda":
            yield case(f"{name}, profiled", "profiles", partial(observed, bench, length, name, profile))
        yield case(f"{name}, host", "stamps", partial(observed, bench, length, name, stamps))
    yield case("load", "load", partial(load, bench, length))
    for batch in filter(partial(_fits, bench, length), bench.scenario.batches):
        yield case(f"decode, batch {batch}", "decode", partial(decode, bench, length, batch))
    yield case(f"decode, {PROPOSED} proposals", "decode", partial(decode, bench, length, 1, PROPOSED))
    own = {"correction beside torch's": _correction} if bench.model.decoder.kernels.has_correction else {}
    for name, check in (CHECKS | own).items():
        yield case(name, "checks", partial(checked, bench, length, name, check))


def prepare(context: Context) -> Bench:
    """Create a model with random weights on the device, take its memory, and open a store."""
    scenario, device = (TINY if context.tiny else FULL), context.device
    model = random_model(context.step, read_config("tiny" if context.tiny else context.step), device, scenario.dtype)
    meter = None if device.type == "cuda" else HostMeter()
    config = EngineConfig(block_size=BLOCK_SIZE, gpu_memory_utilization=0.8)
    memory = reserve(model.decoder, config, meter=meter)
    return Bench(model, memory, scenario, Ceilings.of(context.log.ceilings()), context.folder)


def times(bench: Bench, length: int, name: str) -> list[dict[str, Any]]:
    """Return time to the first token of one case: the median of several runs after a warm-up."""
    run = _run(bench, length, name)
    first_s, _ = run()
    bench.capture()
    found = [run() for _ in range(bench.scenario.reps)]
    values, done = sorted(seconds for seconds, _ in found), found[-1][1]
    row: dict[str, Any] = {"length": length, "case": name, "seconds": statistics.median(values)}
    row |= {"p90_s": values[-(-9 * len(values) // 10) - 1], "first_run_s": first_s, "values": values}
    if not isinstance(done, Tensor):
        row["chosen"] = len((done.result if isinstance(done, Prefilled) else done).chosen)
        kv_bytes = done.result.loader.num_bytes if isinstance(done, Prefilled) else 0
        if not name.endswith((WITHOUT_CACHE, WITHOUT_GRAPHS)):
            suffix = bench.scenario.suffix
            row["expected_s"] = expected_s(bench.model.spec, bench.ceilings, length, suffix, name, kv_bytes)
        loaders = [one.result.loader for _, one in found if isinstance(one, Prefilled)] if kv_bytes else []
        if loaders:
            row["load_gb_s"] = kv_bytes / statistics.median(loader.load_s for loader in loaders) / 1e9
            row["stall_s"] = statistics.median(loader.stall_s for loader in loaders)
    return [row]


def observed(
    bench: Bench, length: int, name: str, observe: Callable[[Callable[[], object]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the rows of one run, warm; what is in the pool is loaded before."""
    for _ in range(2):
        _run(bench, length, name)()
        bench.capture()
    if name.endswith("in the pool"):
        with bench.loaded(length, _blend(name)) as compute:
            rows = observe(compute)
    else:
        rows = observe(_run(bench, length, name))
    return [{"length": length, "case": name, **row} for row in rows]


Done = Prefilled | PrefillResult | Tensor


def _run(bench: Bench, length: int, name: str) -> Callable[[], tuple[float, Done]]:
    if name == THEIRS:
        return partial(bench.run_theirs, length)
    if name.endswith(WITHOUT_CACHE):
        memory = replace(bench.memory, host_cache=None)
        return mock.patch.object(bench.runtime, "_memory", memory)(partial(bench.run, length, _blend(name)))
    if name.endswith(WITHOUT_GRAPHS):
        return mock.patch.object(bench.memory.pool, "layer_graphs", None)(partial(bench.run, length, _blend(name)))
    return partial(bench.run_in_pool if name.endswith("in the pool") else bench.run, length, _blend(name))


def _blend(name: str) -> BlendParams:
    if name == "full":
        return BlendParams(mode="full")
    selector, ratio, *more = name.split()
    blend = BlendParams(ratio=float(ratio), selector=selector)
    return replace(blend, correction="none") if more == ["uncorrected"] else blend


def load(bench: Bench, length: int) -> list[dict[str, Any]]:
    """Measure store (page cache) to pool, with digests checked and nothing else running; on a GPU also by threads."""
    rows = [{"case": "store to pool", **_loaded(bench, length)}]
    if bench.memory.host_cache is not None:
        rows.append({"case": "host cache to pool", **_loaded(bench, length, cached=True)})
    for threads in THREADS if bench.device.type == "cuda" else ():
        with mock.patch.object(loader, "num_workers", lambda at_most, threads=threads: threads):
            rows.append({"case": f"store to pool, {threads} threads", **_loaded(bench, length)})
    return rows


def _loaded(bench: Bench, length: int, *, cached: bool = False) -> dict[str, Any]:
    found = []
    for _ in range(1 + bench.scenario.reps):
        start = time.perf_counter()
        with Loaded(bench, length, cached=cached) as loaded:
            bench.synchronize()
            found.append(time.perf_counter() - start)
    seconds = statistics.median(found[1:])
    speed, ceiling = loaded.num_bytes / seconds / 1e9, bench.ceilings.bus / 1e9
    return {"length": length, "bytes": loaded.num_bytes, "seconds": seconds, "gb_s": speed, "share": speed / ceiling}


def decode(bench: Bench, length: int, batch: int, proposals: int = 0) -> list[dict[str, Any]]:
    """Measure a batch by the engine's loop: the first token of its first prompt, then steps of all sequences.
    proposals: tokens that each step computes besides, most of them wrong."""
    itemsize, num_steps = bench.model.decoder.dtype.itemsize, bench.scenario.decode_steps
    with Decoding(bench, length, batch, proposals) as decoding:
        decoding.run(WARM_STEPS)
        start, before = time.perf_counter(), decoding.num_tokens
        decoding.run(num_steps)
        bench.synchronize()
        seconds, tokens = time.perf_counter() - start, decoding.num_tokens - before
    floor = decode_floor(bench.model.spec, batch, length + num_steps / 2, itemsize, bench.ceilings)
    case = f"batch {batch}, {proposals} proposals" if proposals else f"batch {batch}"
    row = {"length": length, "case": case, "first_token_s": decoding.first_token_s, "tokens": tokens}
    row |= {"tokens_per_s": tokens / seconds, "step_s": seconds / num_steps, "floor_s": floor}
    return [{**row, "share": floor / row["step_s"]}]


def _fits(bench: Bench, length: int, batch: int) -> bool:
    """Return whether the pool holds that many prompts and their answers at once."""
    return batch * (length + _room(bench, batch) + BLOCK_SIZE) <= bench.memory.pool.allocator.num_blocks * BLOCK_SIZE


def _room(bench: Bench, batch: int, proposals: int = 0) -> int:
    """Return the tokens that an answer of a batch may have: prompts begin one after another."""
    return (1 + proposals) * (bench.scenario.decode_steps + WARM_STEPS) + 8 * batch


class Decoding:
    """An engine that has prefilled a batch of prompts from stored KV, and decodes them."""

    def __init__(self, bench: Bench, length: int, batch: int, proposals: int = 0) -> None:
        limits = Limits(max_sequences=batch, enable_prefix_caching=False)
        runtime = copy.copy(bench.runtime)
        runtime.config = replace(bench.runtime.config, speculate=proposals or "off")
        self._core = EngineCore(runtime, limits, bench.memory, Features(speculation=Speculation.of))
        if (speculation := self._core.scheduler.speculation) is not None:
            speculation.drafts = lambda sequences: {s: (s.next_token,) * proposals for s in sequences}  # type: ignore[method-assign]
        request = bench.request(length, BlendParams(mode="reuse"), max_tokens=_room(bench, batch, proposals))
        self._states = [RequestState(replace(request), number) for number in range(batch)]
        self.first_token_s = 0.0

    def __enter__(self) -> Decoding:
        start = time.perf_counter()
        for state in self._states:
            self._core.add(state)
        while not all(state.num_started for state in self._states):
            self.run(1)
            if not self.first_token_s and self.num_tokens:
                self.first_token_s = time.perf_counter() - start
        return self

    def __exit__(self, *exc: object) -> None:
        self._core.close()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers that the host has seen."""
        outputs = (sequence.output for state in self._states for sequence in state.sequences)
        return sum(len(output.out.token_ids) for output in outputs if output is not None)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for _, event in self._core.step():
                if isinstance(event, Failed):
                    raise event.error


Pair = tuple[Tensor, Tensor]  # what was computed, and what it is compared with
Check = Callable[[Bench, int], tuple[float, float]]  # returns error and tolerance


def checked(bench: Bench, length: int, name: str, check: Check) -> list[dict[str, Any]]:
    """Return a row like those of `checks_of`: the error of the whole path against its reference."""
    error, tolerance = check(bench, length)
    row = {"kernel": "whole path", "case": f"{bench.model.name} N={length} {name}", "dtype": bench.scenario.dtype_name}
    row |= {"backend": bench.model.decoder.kernels.name, "tolerance": tolerance, "error": error}
    return [{**row, "ok": error <= tolerance}]


def _full(bench: Bench, length: int) -> Tensor:
    return bench.run(length, BlendParams(mode="full"))[1].result.logits


def _beside_theirs(bench: Bench, length: int) -> tuple[float, float]:
    return row_error(_full(bench, length), bench.run_theirs(length)[1][None]), LOGITS_TOLERANCE[bench.scenario.dtype]


def _at_ratio_one(bench: Bench, length: int) -> tuple[float, float]:
    blend = bench.run(length, BlendParams(ratio=1.0, selector="hkvd"))[1].result.logits
    return row_error(blend, _full(bench, length)), LOGITS_TOLERANCE[bench.scenario.dtype]


def _one_chunk(bench: Bench, length: int) -> tuple[float, float]:
    """Compare reuse with full prefill for a prompt of one chunk, which is exact up to its codec."""
    logits = []
    for mode in ("reuse", "full"):
        done = bench.prefill(bench.request(length, BlendParams(mode=mode), exact=1))
        logits.append(done.result.logits)
        done.sequence.release()
    return row_error(*logits), LOSSY


def _graphs(bench: Bench, length: int) -> tuple[float, float]:
    """Compare logits of decode steps with and without graphs, up to the first token that differs. A graph's bucket of
    context may split the context into more parts, whose sums are rounded in another order."""
    num_tokens, answers = bench.scenario.decode_steps, []
    for runner in (bench.memory.runner, EagerRunner(bench.model.decoder)):
        done = bench.prefill(bench.request(length, BlendParams(mode="full")), num_tokens)
        params, logits = SamplingParams(max_tokens=num_tokens, ignore_eos=True), list[Tensor]()
        tokens = done.answer(
            params, runner=runner, on_logits=lambda row, to=logits: to.append(row.flatten().clone())
        ).token_ids
        answers.append((tokens, logits))
        done.sequence.release()
    (tokens, found), (wanted_tokens, wanted) = answers
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, wanted_tokens, strict=True)))
    steps = slice(min(alike + 1, num_tokens))
    return row_error(torch.stack(found[steps]), torch.stack(wanted[steps])), LOGITS_TOLERANCE[bench.scenario.dtype]


def _correction(bench: Bench, length: int) -> tuple[float, float]:
    """Compare the logits behind corrected KV with those of a correction by torch's operations."""
    kernels, blend = bench.model.decoder.kernels, BlendParams(ratio=0.15, selector="hkvd")
    found = bench.run(length, blend)[1].result.logits
    kernels.has_correction = False
    try:
        return row_error(found, bench.run(length, blend)[1].result.logits), LOGITS_TOLERANCE[bench.scenario.dtype]
    finally:
        del kernels.has_correction


@torch.inference_mode()
def _in_pool(bench: Bench, length: int) -> tuple[float, float]:
    """Return the error of loaded KV, for a few layers of every chunk, against the same bytes decoded and rotated in
    fp64."""
    with Loaded(bench, length) as loaded:
        errors = [row_error(got, want) for got, want in _loaded_rows(bench, loaded, length)]
    worst = float("nan") if any(error != error for error in errors) else max(errors)
    return worst, TOLERANCE.get(bench.scenario.dtype, 1e-5)


def _loaded_rows(bench: Bench, loaded: Loaded, length: int) -> Iterator[Pair]:
    spec, rope = bench.model.spec, bench.model.decoder.rope
    with bench.store.read() as reader:
        for layer in sorted({0, spec.num_layers // 2, spec.num_layers - 1}):
            for segment in (s for s in loaded.plan.segments if s.cached):
                assert segment.key is not None
                manifest = reader.undamaged(segment.key)
                assert manifest is not None
                k, v = read_kv(reader, manifest, layer)
                positions = torch.arange(segment.start, segment.end, device=bench.device)
                tables = rope.cos_sin(positions, length)[rope.of_layer[layer]]
                cache, slots = bench.memory.pool.layers[layer], loaded.sequence.slots(positions)
                yield cache.k.flatten(0, 1)[slots], rope_reference(k.to(bench.device), *tables)
                yield cache.v.flatten(0, 1)[slots], v.to(bench.device)


CHECKS: dict[str, Check] = {
    "stored KV in the pool": _in_pool,
    "full prefill beside transformers": _beside_theirs,
    "blend at ratio 1 beside full prefill": _at_ratio_one,
    "prefix and one chunk from the store beside full prefill": _one_chunk,
    "decoding with graphs beside eager": _graphs,
}
