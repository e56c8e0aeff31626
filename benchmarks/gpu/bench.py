"""A model with random weights, a store of its chunks, and prompts over them, for `end_to_end.py`.

Prompts have a prefix, chunks of 512 tokens and a suffix of 64; KV is stored in the default codec. No chunk counts as
exact unless requested: the first is repaired like the others, as in the cost model (`cost.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from cacheblend_store.format.codecs import is_lossless
from gpu.cost import Ceilings
from gpu.model import RandomModel
from torch import Tensor

from cacheblend_cli.blend.policy import policy_of, row_tile_of
from cacheblend_cli.blend.prefill import PrefillResult, blended_prefill
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.citations import Citation
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.request import Request, RequestChunk
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.memory import DeviceMemory
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.loading import make_loader
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt
from cacheblend_cli.types import BlendParams, SamplingParams

PREFIX_TOKENS, BLOCK_SIZE = 16, 64


@dataclass(frozen=True)
class Scenario:
    """Sizes of a measurement. lengths: prompt tokens; batches: sequences decoded together; reps: timed runs after a
    warm-up."""

    lengths: tuple[int, ...]
    chunk_tokens: int
    suffix: int
    batches: tuple[int, ...]
    decode_steps: int
    reps: int
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


FULL = Scenario((4096, 16384), 512, 64, (1, 8, 32), 64, 15, torch.bfloat16)
TINY = Scenario((96, 160), 24, 8, (1, 2), 6, 1, torch.float32)


class HostMeter:
    """Stands in for the memory meter on a CPU: the pool gets room for two of the model's contexts."""

    total = 1 << 40

    def used(self) -> int:
        return 0

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return 0


class Bench:
    """A model, a store of its chunks, and the timed runs over them."""

    def __init__(
        self, model: RandomModel, memory: DeviceMemory, scenario: Scenario, ceilings: Ceilings, folder: Path
    ) -> None:
        self.model, self.memory, self.scenario, self.ceilings = model, memory, scenario, ceilings
        self.device, self._folder = model.decoder.device, folder
        generator = torch.Generator().manual_seed(1)

        def draw(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(5, model.spec.vocab_size, (count,), generator=generator).tolist())

        self.runtime = Runtime(model, EngineConfig(block_size=BLOCK_SIZE, speculate="off"), memory)
        self.runtime.template = replace(self.runtime.template, prefix_ids=draw(PREFIX_TOKENS))
        self.collection = self.runtime.collection()
        self.lossless = is_lossless(self.collection.codec, model.decoder.dtype)
        self.suffix = draw(scenario.suffix)
        self.chunks = {n: tuple(draw(size) for size in self._sizes(n)) for n in sorted(scenario.lengths)}
        self.store = ChunkStore.open(folder / f"{model.name}-store", mode="write", force=True)
        self.twin: Any = None  # transformers' model over the same weights

    def _sizes(self, length: int) -> list[int]:
        size, left = self.scenario.chunk_tokens, length - PREFIX_TOKENS - self.scenario.suffix
        return [size] * (left // size) + ([left % size] if left % size else [])

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close()

    def fill(self, length: int) -> dict[str, Any]:
        """Collect and store the prefix and the prompt's chunks. Tried once, also by processes that continue."""
        tried = self._folder / f"{self.model.name}-{length}"
        if tried.exists():
            raise RuntimeError(f"storing the KV of {length} tokens failed before")
        tried.touch()
        start, chunks = time.perf_counter(), self.chunks[length]
        planned = [
            PlannedChunk(self.collection.key(ids), "bench", Chunk(n, "", ids, 0, 0), (), "sink")
            for n, ids in enumerate(chunks)
        ]
        for _ in Collector(self.collection, self.store).store(planned, again=True):
            pass
        tried.unlink()
        seconds, tokens = time.perf_counter() - start, sum(map(len, chunks))
        num_bytes = sum(self.collection.stored_bytes(len(ids)) for ids in chunks)
        row = {"length": length, "tokens": tokens, "bytes": num_bytes, "seconds": seconds}
        return {**row, "tokens_per_s": tokens / seconds, "codec": self.collection.codec}

    def is_filled(self, length: int) -> bool:
        with self.store.read() as reader:
            return all(reader.undamaged(self.collection.key(ids)) is not None for ids in self.chunks[length])

    def inputs(self, length: int, exact: bool = False) -> tuple[ChunkInput, ...]:
        """Return the prompt's chunks for the plan. exact: mark them as exact where a full prefill would compute the
        same."""
        chunks = self.chunks[length]
        return tuple(ChunkInput(self.collection.key(ids), "bench", ids, same_regime=exact) for ids in chunks)

    def request(self, length: int, blend: BlendParams, *, exact: int | None = None, max_tokens: int = 1) -> Request:
        """Return a request over the prompt's chunks. exact: only that many leading chunks, exact where a full prefill
        would compute the same."""
        inputs = self.inputs(length, exact is not None)[:exact]
        chunks = tuple(RequestChunk(c.key, c, Citation("bench", n)) for n, c in enumerate(inputs))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(
            "", self.collection, self.store, suffix_ids=self.suffix, chunks=chunks, blend=blend, sampling=sampling,
            lossless=self.lossless,
        )  # fmt: skip

    def prefill(self, request: Request, headroom: int = 0) -> Prefilled:
        """Run the tool's prefill; raises if it did not use all stored chunks."""
        done = prefill(self.runtime, request, headroom=headroom)
        if request.notes:
            raise RuntimeError(f"stored KV was not used: {request.notes}")
        return done

    def run(self, length: int, blend: BlendParams) -> tuple[float, Prefilled]:
        """Return seconds to the first token on the host."""
        start = time.perf_counter()
        done = self.prefill(self.request(length, blend))
        done.result.logits[-1].argmax().item()
        seconds = time.perf_counter() - start
        done.sequence.release()
        return seconds, done

    @contextmanager
    def loaded(self, length: int, blend: BlendParams) -> Iterator[Callable[[], PrefillResult]]:
        """Hold the prompt's stored KV in the pool. Yields the function that computes alone, once."""
        policy = policy_of(blend, self.model.spec.num_layers, self.lossless, row_tile_of(self.device))
        with torch.inference_mode(), Loaded(self, length) as loaded:
            self.synchronize()

            def compute() -> PrefillResult:
                prompt = Prompt(self.model.decoder, loaded.plan, loaded.sequence, KVLoader())
                result = blended_prefill(prompt, policy)
                result.logits[-1].argmax().item()
                return result

            yield compute

    def run_in_pool(self, length: int, blend: BlendParams) -> tuple[float, PrefillResult]:
        """Return seconds as `run` does, with stored KV in the pool already: compute alone."""
        with self.loaded(length, blend) as compute:
            start = time.perf_counter()
            result = compute()
            return time.perf_counter() - start, result

    @torch.inference_mode()
    def run_theirs(self, length: int) -> tuple[float, Tensor]:
        ids = [*self.collection.prefix_ids, *(i for ids in self.chunks[length] for i in ids), *self.suffix]
        prompt = torch.tensor([ids], device=self.device)
        start = time.perf_counter()
        logits: Tensor = self.twin(prompt, use_cache=True, logits_to_keep=1).logits[0, -1]
        logits.argmax().item()
        return time.perf_counter() - start, logits.float()

    def capture(self) -> None:
        """Capture the graphs that prompts lacked, as an idle engine does."""
        graphs = getattr(self.memory.runner, "layer_graphs", None)
        while graphs is not None and graphs.capture_next():
            pass

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Loaded:
    """Context manager that holds the stored KV of a prompt in the pool, without computing."""

    def __init__(self, bench: Bench, length: int, *, cached: bool = False) -> None:
        """cached: whether the chunks come from the host cache, if they were loaded before."""
        prefix, key = bench.collection.prefix_ids, bench.collection.prefix_key
        self.plan = plan_prompt(prefix, bench.inputs(length), bench.suffix, prefix_key=key, reuse=True)
        self.sequence = bench.memory.pool.new_sequence(length)
        cache = bench.memory.host_cache if cached else None
        self._loader = make_loader(bench.model.decoder, bench.store, self.sequence, self.plan, cache)
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
