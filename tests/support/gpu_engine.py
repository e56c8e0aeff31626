"""An engine on a fake GPU and one on the CPU, over the same model and store."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from cacheblend_kernels.triton_backend.backend import TritonBackend
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from fake_gpu import FakeGpu, compute_with_torch, installed, watch_launches

from cacheblend_cli.blend.prefill import blended_layers
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.core import EngineCore
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.worker import memory, prefill
from cacheblend_cli.engine.worker.decode import cuda_capture, make_runner
from cacheblend_cli.engine.worker.memory import DeviceMemory, reserve
from cacheblend_cli.engine.worker.sampling import draw_together
from cacheblend_cli.engine.worker.worker import Worker
from cacheblend_cli.kv.forward import layer_by_layer
from cacheblend_cli.kv.loader import StoredLoader
from cacheblend_cli.kv.pool import KVPool

WAITS = ("synchronisation", "pageable copy")
PROFILE_ROWS = (64, 32)


def _code(function: Callable[..., Any]) -> CodeType:
    return inspect.unwrap(function).__code__


PHASES = {
    _code(reserve): "warm-up",
    _code(StoredLoader._work): "loading",
    _code(cuda_capture): "capture",
    _code(Worker.decode): "decode",
    _code(draw_together): "decode",
    _code(blended_layers): "layers",
    _code(layer_by_layer): "layers",
    _code(Worker.begin): "prefill",
    _code(Worker.prefill): "prefill",
    _code(EngineCore.step): "step",
}
"""The first of these on the stack is the phase. layers: of a prefill; decode: a decode step and its draws."""


@contextmanager
def row_tile(tile: int) -> Iterator[None]:
    """Round recomputed rows to a multiple of `tile`, on any device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "row_tile_of", lambda device: tile)
        yield


@contextmanager
def engine_gpu(tile: int = 1) -> Iterator[FakeGpu]:
    """A fake GPU. Rows are rounded to a multiple of `tile`, so that small prompts are blended too."""
    with installed(PHASES) as gpu, row_tile(tile), pytest.MonkeyPatch.context() as patch:
        watch_launches(gpu, patch)
        compute_with_torch(gpu, patch, TritonBackend)
        patch.setattr(memory, "PROFILE_ROWS", PROFILE_ROWS)
        yield gpu


@dataclass(frozen=True)
class Setup:
    """A model and documents on disk, and the settings of every engine over them."""

    path: Path
    settings: dict[str, Any]

    @classmethod
    def write(
        cls, path: Path, family: str = "llama-gqa", num_chunks: int = 4, model: Any = None, **settings: Any
    ) -> Setup:
        """model: fields of the model's config."""
        write_checkpoint(path / "model", family, **(model or {}))
        pages = (" ".join(WORDS[(p + i) % len(WORDS)] for i in range(10 + 2 * p)) + f" {p}." for p in range(num_chunks))
        (path / "a.md").write_text("\n\n".join(pages) + "\n")
        shared = {"block_size": 16, "dtype": "float32", "prompt": "{chunks}{question}"}
        return cls(path, {"model": str(path / "model"), **shared, **settings})

    def engine(self, device: str) -> Engine:
        backend = {"attention_backend": "torch"} if device == "cpu" else {}
        return Engine.load(EngineConfig(device=device, **backend, **self.settings))

    @contextmanager
    def store(self) -> Iterator[ChunkStore]:
        with ChunkStore.open(self.path / "store", mode="write") as store:
            yield store

    def precompute(self, engine: Engine, store: ChunkStore) -> list[bytes]:
        """Store the chunks, and return their keys, the last chunk first."""
        options = PrecomputeOptions(chunk_tokens=24)
        engine.precompute(store, [str(self.path / "a.md")], options, lambda event: None)
        chunks = sorted((m for m in store.chunks() if m.context != "prefix"), key=lambda m: m.index)
        return [m.key for m in reversed(chunks)]


def use_pool(engine: Engine, num_blocks: int) -> None:
    """Give the engine a pool of so many blocks instead of one of the device's size."""
    decoder, config = engine.model.decoder, engine.config
    with torch.inference_mode():
        pool = KVPool.of(decoder, num_blocks, config.block_size)
    engine.runtime._memory = DeviceMemory(pool, make_runner(decoder, pool, config.eager))


def capture_graphs(engine: Engine) -> int:
    """Capture the layers that prompts had no graphs for, as an idle engine does. Returns their number."""
    memory, count = engine.runtime.memory(), 0
    assert memory is not None
    worker = Worker(engine.model.decoder, memory)
    while worker.prepare():
        count += 1
    return count


def waits(gpu: FakeGpu, *phases: str) -> dict[str, int]:
    """Return call site -> number of synchronisations and pageable copies in the phases."""
    return {site: count for kind in WAITS for site, count in gpu.found(kind, *phases).items()}


def check_waits(gpu: FakeGpu, allowed: Mapping[str, int], waiting: tuple[str, ...] = ()) -> None:
    """Check that no phase waits more often than allowed. waiting: beginnings of call sites that do not count."""
    for phase, most in allowed.items():
        found = {site: count for site, count in waits(gpu, phase).items() if not (waiting and site.startswith(waiting))}
        assert sum(found.values()) <= most, f"{phase}: {found}"
