"""From the question to the answer with random weights at a model's shape: time to the first token of transformers, of our
full prefill and of the blend from a warm store, loading alone, and decoding with and without graphs.

The prompts are what the tool makes: a prefix, chunks of 512 tokens, a suffix of 64. No chunk is taken for exact: the first
is repaired like the others, as the cost model has it (`gpu_cost.py`), beside whose floor every time stands.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from cacheblend_store.codecs import decode_kv, view_kv
from gpu_budget import Budget
from gpu_checks import TOLERANCE, rope_reference, row_error
from gpu_cost import Ceilings, decode_floor, decode_weight_bytes, prefill_floor, prefill_flops
from gpu_model import random_model, read_config, transformers_model
from torch import Tensor

from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.ask import Prefilled, Request, prefill
from cacheblend_cli.engine.collect import collect, collect_prefix
from cacheblend_cli.engine.config import BlendConfig
from cacheblend_cli.engine.decode import CAPTURABLE, DecodeRunner, EagerRunner, GraphRunner
from cacheblend_cli.engine.generate import Generation, generate
from cacheblend_cli.engine.kv_loader import KVLoader
from cacheblend_cli.engine.memory import DeviceMemory, reserve
from cacheblend_cli.engine.precompute import Collection, PlannedChunk, collect_sequences, store_chunk
from cacheblend_cli.engine.sampling import SamplingParams
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt

RATIOS = (0.0, 0.05, 0.10, 0.15, 0.20, 1.0)
PREFIX_TOKENS = 16
BLOCK_SIZE = 64
LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(frozen=True)
class Scenario:
    """What is measured. lengths: tokens of the prompts; reps: timed runs after a warm-up; utilization: of a GPU's memory."""

    models: tuple[str, ...]
    lengths: tuple[int, ...]
    chunk_tokens: int
    suffix: int
    decode_tokens: int
    reps: int
    dtype: torch.dtype
    utilization: float = 0.8


FULL = Scenario(("llama-3.1-8b", "llama-3.2-1b"), (4096, 16384), 512, 64, 96, 5, torch.bfloat16)
TINY = Scenario(("tiny",), (96, 160), 24, 8, 6, 1, torch.float32)


class HostMeter:
    """A CPU's memory is not metered: the pool takes what two of the model's contexts need."""

    total = 1 << 40

    def used(self) -> int:
        return 0

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return 0


def measure_end_to_end(
    name: str, scenario: Scenario, device: torch.device, measured: dict[str, Any], folder: Path, budget: Budget
) -> dict[str, Any]:
    """One model: {model, times: [...], decode: [...], load: [...], checks: [...], ...}; rows are plain dicts.

    measured: what `measure_ceilings` returned. folder: where the store goes. What the budget has no time for is left out
    and said there.
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
            result["checks"] += bench.checks(length)
            result["times"] += bench.times(length)
            result["load"] += bench.load(length)
            result["decode"] += bench.decode(length)
    del bench, memory, model
    _free(device)
    return result


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Bench:
    """A model, a store of its chunks, and the measurements over them."""

    def __init__(
        self,
        model: LoadedModel,
        memory: DeviceMemory,
        scenario: Scenario,
        ceilings: Ceilings,
        folder: Path,
        budget: Budget,
    ) -> None:
        self.model, self.memory, self.scenario, self.ceilings, self.budget = model, memory, scenario, ceilings, budget
        self.device = model.decoder.device
        generator = torch.Generator().manual_seed(1)

        def draw(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(5, model.spec.vocab_size, (count,), generator=generator).tolist())

        self.collection = Collection.of(model, draw(PREFIX_TOKENS), "auto", "")
        self.suffix = draw(scenario.suffix)
        self.chunks = {n: self._chunks(n, draw) for n in sorted(scenario.lengths)}
        self.store = ChunkStore.open(folder / f"{model.name}-store", mode="write")
        self.runners = self._runners()
        self._twin: Any = None

    def _runners(self) -> dict[str, DecodeRunner]:
        """On a CPU the graph's function is run instead of replayed."""
        decoder, pool = self.model.decoder, self.memory.pool
        runners: dict[str, DecodeRunner] = {"eager": EagerRunner(decoder, pool)}
        if self.device.type != "cuda":
            runners["graphs"] = GraphRunner(decoder, pool, lambda function: function)
        elif decoder.kernels.name in CAPTURABLE:
            runners["graphs"] = GraphRunner(decoder, pool)
        return runners

    def _chunks(self, length: int, draw: Callable[[int], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        size, left = self.scenario.chunk_tokens, length - PREFIX_TOKENS - self.scenario.suffix
        sizes = [size] * (left // size) + ([left % size] if left % size else [])
        return tuple(draw(n) for n in sizes)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close()

    def fill(self) -> dict[str, float]:
        """Collect and store the prefix and every chunk."""
        start = time.perf_counter()
        decoder, collection = self.model.decoder, self.collection
        prefix = collect_prefix(decoder, collection.prefix_ids, BLOCK_SIZE, collection.prefix_key)
        head = Chunk(0, "", tuple(collection.prefix_ids), 0, 0)
        store_chunk(
            self.store, collection, PlannedChunk(collection.prefix_key, "(prefix)", head, (), "prefix"), prefix.kv
        )
        planned = [
            PlannedChunk(collection.key(ids), "bench", Chunk(n, "", ids, 0, 0), (), "sink")
            for chunks in self.chunks.values()
            for n, ids in enumerate(chunks)
        ]
        size = 0
        for chunk, kv in zip(planned, collect(decoder, prefix, collect_sequences(planned), BLOCK_SIZE), strict=True):
            size += store_chunk(self.store, collection, chunk, kv)[1]
        return {
            "tokens": sum(len(p.chunk.token_ids) for p in planned),
            "bytes": size,
            "seconds": time.perf_counter() - start,
        }

    def inputs(self, length: int, exact: bool = False) -> tuple[ChunkInput, ...]:
        """exact: a chunk may be taken for what a full prefill would compute, where it is."""
        return tuple(
            ChunkInput(self.collection.key(ids), "bench", ids, same_regime=exact) for ids in self.chunks[length]
        )

    def prefill(
        self, length: int, blend: BlendConfig, chunks: tuple[ChunkInput, ...] | None = None, room: int = 0
    ) -> Prefilled:
        """The tool's own prefill; it must have used everything that is stored."""
        notes: list[str] = []
        request = Request(self.suffix, chunks or self.inputs(length), blend, SamplingParams(), True)
        done = prefill(
            self.model, self.collection, self.store, request, BLOCK_SIZE, notes, room=room, memory=self.memory
        )
        if notes:
            raise RuntimeError(f"stored KV was not used: {notes}")
        return done

    def run(self, length: int, blend: BlendConfig) -> tuple[float, Prefilled]:
        """Seconds to the first token, which is then on the host."""
        start = time.perf_counter()
        done = self.prefill(length, blend)
        done.result.logits[-1].argmax().item()
        seconds = time.perf_counter() - start
        done.sequence.release()
        return seconds, done

    @torch.inference_mode()
    def run_theirs(self, length: int) -> tuple[float, Tensor]:
        prompt = torch.tensor([self.prompt(length)], device=self.device)
        if self._twin is None:
            self._twin = transformers_model(self.model)
        start = time.perf_counter()
        logits: Tensor = self._twin(prompt, use_cache=True, logits_to_keep=1).logits[0, -1]
        logits.argmax().item()
        return time.perf_counter() - start, logits.float()

    def prompt(self, length: int) -> list[int]:
        return [*self.collection.prefix_ids, *(i for ids in self.chunks[length] for i in ids), *self.suffix]

    def times(self, length: int) -> list[dict[str, Any]]:
        """Time to the first token of every case, in turn, so that all see the same machine."""
        cases: dict[str, Callable[[], tuple[float, Any]]] = {
            "full": partial(self.run, length, BlendConfig(mode="full")),
            "transformers": partial(self.run_theirs, length),
        }
        for ratio in RATIOS:
            cases[f"blend {ratio:.2f}"] = partial(self.run, length, BlendConfig(ratio=ratio))
        seconds: dict[str, list[float]] = {}
        stalls: dict[str, list[tuple[float, float]]] = {}
        done: dict[str, Prefilled] = {}
        what = f"{self.model.name} N={length}"
        for name, case in cases.items():  # compiles kernels, and tells what a run takes
            start = time.perf_counter()
            case()
            if self.budget.allows(2 * (time.perf_counter() - start), f"{what} {name}"):
                seconds[name], stalls[name] = [], []
        for _ in range(self.scenario.reps):
            round_s = sum(max(found, default=0.0) for found in seconds.values())
            if not self.budget.allows(round_s, f"one more round of {what}"):
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
                rows.append(self._time_row(length, name, found, stalls[name], done))
        full = next((row for row in rows if row["case"] == "full"), None)
        for row in rows:
            if full is not None and row is not full:
                row["speedup"] = full["seconds"] / row["seconds"]
                row["speedup_ceiling"] = full["floor_s"] / row["floor_s"]
        return rows

    def _time_row(
        self,
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
            spec, size = self.model.spec, self.scenario.suffix
            kv_bytes = own.loader.num_bytes
            row["floor_s"] = prefill_floor(spec, length, size, own.result.layers, kv_bytes, self.ceilings)
            row["share"] = row["floor_s"] / median
            row["tflop_s"] = prefill_flops(spec, length, size, own.result.layers) / median / 1e12
            row["kv_bytes"] = kv_bytes
            row["chosen"] = len(own.result.chosen)
        if stalls and own is not None and own.loader.num_bytes:
            row["load_s"] = statistics.median(load for load, _ in stalls)
            row["load_gb_s"] = own.loader.num_bytes / row["load_s"] / 1e9
            row["stall_s"] = statistics.median(stall for _, stall in stalls)
        return row

    def load(self, length: int) -> list[dict[str, Any]]:
        """Store (page cache) to pool, every byte verified, with nothing computed beside it."""
        found = []
        for _ in range(1 + self.scenario.reps):
            start = time.perf_counter()
            with Loaded(self, length) as loaded:
                self._synchronize()
                found.append(time.perf_counter() - start)
        seconds = statistics.median(found[1:])
        speed, ceiling = loaded.num_bytes / seconds / 1e9, self.ceilings.bus / 1e9
        row = {"length": length, "bytes": loaded.num_bytes, "seconds": seconds, "gb_s": speed}
        return [{**row, "ceiling_gb_s": ceiling, "share": speed / ceiling}]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def decode(self, length: int) -> list[dict[str, Any]]:
        """Tokens a second of one sequence after the prompt, the tool's own loop, with graphs and without."""
        decoder = self.model.decoder
        num_tokens, itemsize = self.scenario.decode_tokens, decoder.dtype.itemsize
        weights = decode_weight_bytes(self.model.spec, itemsize)
        floor = decode_floor(self.model.spec, weights, length + num_tokens / 2, itemsize, self.ceilings)
        rows, answers = [], {}
        for name, runner in self.runners.items():
            if not self.budget.allows(4 * floor * num_tokens, f"{self.model.name} decoding at {length} with {name}"):
                continue
            found = [self._generate(length, runner) for _ in range(3)]  # the first captures the graph
            answers[name] = found[-1].token_ids
            speed = statistics.median(one.tokens_per_s for one in found[1:])
            row = {"length": length, "case": name, "tokens_per_s": speed, "floor_s": floor, "share": floor * speed}
            rows.append({**row, "weight_bound_share": weights / self.ceilings.memory * speed})
        if len(answers) == 2:
            alike = sum(a == b for a, b in zip(*answers.values(), strict=True))
            rows[-1]["tokens_like_eager"] = alike / num_tokens
        return rows

    def _generate(self, length: int, runner: DecodeRunner) -> Generation:
        num_tokens = self.scenario.decode_tokens
        done = self.prefill(length, BlendConfig(mode="full"), room=num_tokens)
        try:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            return generate(
                self.model.decoder, done.pool, done.sequence, done.plan.num_tokens, done.result.logits[-1],
                self.model.tokenizer, self.model.eos_ids, params, runner=runner,
            )  # fmt: skip
        finally:
            done.sequence.release()

    def checks(self, length: int) -> list[dict[str, Any]]:
        """Rows like those of `run_kernel_checks`: what the whole path gives beside what it must give."""
        allowed = LOGITS_TOLERANCE[self.scenario.dtype]
        full = self.run(length, BlendConfig(mode="full"))[1].result.logits
        found = {
            "full prefill beside transformers'": (full, self.run_theirs(length)[1][None]),
            "blend at ratio 1 beside full prefill": (self.run(length, BlendConfig(ratio=1.0))[1].result.logits, full),
            "prefix and one chunk from the store beside full prefill": self._one_chunk(length),
        }
        rows = [self._check(length, case, row_error(*pair), allowed) for case, pair in found.items()]
        loaded = TOLERANCE.get(self.scenario.dtype, 1e-5)
        return [*rows, self._check(length, "stored KV in the pool", self._pool_error(length), loaded)]

    def _check(self, length: int, case: str, error: float, tolerance: float) -> dict[str, Any]:
        row = {"model": self.model.name, "length": length, "case": case, "error": error, "tolerance": tolerance}
        if not error <= tolerance:
            print(f"  FAIL {self.model.name} N={length} {case}: {error:.2e} > {tolerance:.0e}", file=sys.stderr)
        return {**row, "ok": error <= tolerance}

    def _one_chunk(self, length: int) -> tuple[Tensor, Tensor]:
        """Everything before the suffix is exact, so nothing is left to repair."""
        logits, first = [], self.inputs(length, exact=True)[:1]
        for mode in ("reuse", "full"):
            done = self.prefill(length, BlendConfig(mode=mode), first)
            logits.append(done.result.logits)
            done.sequence.release()
        return logits[0], logits[1]

    @torch.inference_mode()
    def _pool_error(self, length: int) -> float:
        """What the loader wrote, a few layers of every chunk, beside the same bytes decoded and rotated in fp64."""
        spec, rope = self.model.spec, self.model.decoder.rope
        worst = 0.0
        with Loaded(self, length) as loaded, self.store.read() as reader:
            for layer in sorted({0, spec.num_layers // 2, spec.num_layers - 1}):
                for segment in (s for s in loaded.plan.segments if s.cached):
                    assert segment.key is not None
                    count = segment.end - segment.start
                    shape = (count, spec.num_kv_heads, spec.head_dim)
                    k, v = decode_kv(view_kv(reader.layer(segment.key, layer), self.collection.codec, *shape))
                    positions = torch.arange(segment.start, segment.end, device=self.device)
                    tables = rope.cos_sin(positions, length)
                    slots = loaded.sequence.slots(positions)
                    wanted = rope_reference(k.to(self.device), *tables), v.to(self.device)
                    for cache, want in zip((self.memory.pool.k, self.memory.pool.v), wanted, strict=True):
                        got = cache[layer].view(-1, *shape[1:])[slots]
                        worst = max(worst, row_error(got, want), key=_nan_first)
        return worst


class Loaded:
    """The stored KV of a prompt in the pool, as long as the context lasts; nothing is computed."""

    def __init__(self, bench: Bench, length: int) -> None:
        collection = bench.collection
        self.plan = plan_prompt(
            collection.prefix_ids,
            bench.inputs(length),
            bench.suffix,
            prefix_key=collection.prefix_key,
            reuse=True,
        )
        self.sequence = bench.memory.pool.new_sequence(length)
        self._loader = KVLoader(
            bench.model.decoder, bench.store, bench.memory.pool, self.sequence, self.plan.segments, length
        )
        self._num_layers = bench.model.spec.num_layers

    def __enter__(self) -> Loaded:
        with self._loader as loader:
            for layer in range(self._num_layers):
                loader.wait(layer)
        return self

    def __exit__(self, *exc: object) -> None:
        self.sequence.release()

    @property
    def num_bytes(self) -> int:
        return self._loader.num_bytes


def _nan_first(error: float) -> float:
    return float("inf") if error != error else error
