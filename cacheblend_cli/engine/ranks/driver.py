"""Driver and worker of rank 0: they send their calls to all ranks of tensor parallelism.

A message is msgpack of one of the structs here or of `collect.prefill`; it starts a computation of all ranks. Sampling,
scheduling, block tables and writing to the store happen on rank 0 only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from cacheblend_store import ChunkStore
from torch import Tensor

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.ranks.rank_group import group_of, rank_device
from cacheblend_cli.engine.worker.memory import DeviceMemory, reserve
from cacheblend_cli.engine.worker.prefill import PrefillInput
from cacheblend_cli.engine.worker.worker import DecodeInput, TableInput, Worker
from cacheblend_cli.errors import CacheBlendError, DeviceError, UsageError
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.kv.export import KVReader
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.description import Precision, resolve_dtype
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.model.loading import LoadedModel, load_model
from cacheblend_cli.model.rank_shard import RankShard, check_divisible
from cacheblend_cli.model.ranks import Ranks


class LoadModel(msgspec.Struct, tag=True):
    """Load a model."""

    model: int  # number in later messages
    path: str
    config: EngineConfig


class Calibrate(msgspec.Struct, tag=True):
    model: int
    prefix_ids: tuple[int, ...]


class Reserve(msgspec.Struct, tag=True):
    """Allocate the pool of a GPU."""

    model: int
    num_prompts: int


class Drop(msgspec.Struct, tag=True):
    """Drop models and workers that rank 0 no longer has."""

    models: list[int]
    workers: list[int]


class NewWorker(msgspec.Struct, tag=True):
    worker: int
    model: int
    num_blocks: int
    block_size: int


class Begin(msgspec.Struct, tag=True):
    worker: int
    given: PrefillInput
    store: str  # folder of the store to load KV from, "" for none


class Call(msgspec.Struct, tag=True):
    """Call a method of a worker. arguments: of the types in ARGUMENTS."""

    worker: int
    method: str
    arguments: msgspec.Raw


ARGUMENTS: dict[str, Any] = {
    "prefill": tuple[list[int], int, bool],
    "end": tuple[int],
    "decode": tuple[DecodeInput],
    "copy_blocks": tuple[list[int], list[int]],
    "swap_out": tuple[int, list[int]],
    "swap_in": tuple[int, list[int]],
    "forget": tuple[int],
}
T = TypeVar("T")


class Driver:
    """A model on all ranks. model: its number."""

    numbers = itertools.count()
    gone_models, gone_workers = list[int](), list[int]()

    def __init__(self, size: int, device: torch.device) -> None:
        """size: number of ranks, which are started if there are none."""
        self.group, self.model = group_of(size, rank_device(device, 0)), next(self.numbers)
        weakref.finalize(self, self.gone_models.append, self.model)

    @contextmanager
    def telling(self, message: msgspec.Struct) -> Iterator[None]:
        """Send a message, and run the requested computation in the context. An error on rank 0 alone ends the other
        ranks."""
        ranks = self.group.ranks
        with ranks.lock:
            self.drop()
            with ranks.telling(message):
                yield

    def drop(self) -> None:
        """Drop models and workers on the other ranks that no longer exist on this one."""
        with self.group.ranks.lock:
            if (self.gone_models or self.gone_workers) and not self.group.has_ended:
                models, workers = ([gone.pop() for _ in [*gone]] for gone in (self.gone_models, self.gone_workers))
                self.group.ranks.tell(Drop(models, workers))

    def load(self, path: Path, name: str, config: EngineConfig) -> LoadedModel:
        """Load the model on every rank. Raises the error of any rank."""
        ranks = self.group.ranks
        with ranks.lock:
            self.drop()
            ranks.tell(LoadModel(self.model, str(path), config))
            try:
                loaded = load_part(path, name, config, ranks)
            except BaseException as error:
                if not isinstance(error, Exception):  # an interrupt: the others wait for this rank
                    ranks.failed(error)
                raise
        loaded.decoder.number = self.model
        return loaded

    def reserve(self, decoder: Decoder, config: EngineConfig, num_prompts: int) -> DeviceMemory:
        """Allocate the pool on every rank's GPU."""
        with self.telling(Reserve(self.model, num_prompts)):
            return reserve(decoder, config, num_prompts=num_prompts)

    def kv_scales(self, model: LoadedModel, prefix_ids: tuple[int, ...], config: EngineConfig) -> KVScales:
        """Compute the scales of every rank's float8 pools."""
        with self.telling(Calibrate(self.model, prefix_ids)):
            return calibrate(model.decoder, prefix_ids, config.block_size)

    def worker(self, decoder: Decoder, memory: DeviceMemory) -> Worker:
        """Return rank 0's worker, whose calls run on all ranks."""
        return RankedWorker(self, decoder, memory)

    @property
    def is_lost(self) -> bool:
        """Return whether another rank has ended, so that no request can be answered."""
        return self.group.is_lost

    def when_lost(self, act: Callable[[CacheBlendError], Any]) -> None:
        """Call `act`, from any thread, when another rank is lost."""
        self.group.on_lost = act


def _by_all(method: Callable[..., T]) -> Callable[..., T]:
    """Return a method of `RankedWorker` that runs this one on all ranks."""

    def on_all_ranks(worker: RankedWorker, *arguments: Any) -> T:
        raw = msgspec.Raw(msgspec.msgpack.encode(arguments))
        with worker.driver.telling(Call(worker.number, method.__name__, raw)):
            return method(worker, *arguments)

    return on_all_ranks


class RankedWorker(Worker):
    """Rank 0's worker, whose calls run on all ranks."""

    def __init__(self, driver: Driver, decoder: Decoder, memory: DeviceMemory) -> None:
        self.driver, self.number = driver, next(driver.numbers)
        pool = memory.pool
        with driver.telling(NewWorker(self.number, driver.model, pool.allocator.num_blocks, pool.block_size)):
            super().__init__(decoder, memory)
        self._gone = weakref.finalize(self, driver.gone_workers.append, self.number)

    def close(self) -> None:
        self._gone()

    def begin(
        self, given: PrefillInput, source: KVSource | None, on_logits: Callable[[Tensor], None] = lambda logits: None
    ) -> None:
        folder = str(source.path.absolute()) if isinstance(source, ChunkStore) else ""
        with self.driver.telling(Begin(self.number, given, folder)):
            super().begin(given, source, on_logits)

    prefill = _by_all(Worker.prefill)
    decode = _by_all(Worker.decode)
    copy_blocks = _by_all(Worker.copy_blocks)
    swap_out = _by_all(Worker.swap_out)
    swap_in = _by_all(Worker.swap_in)
    forget = _by_all(Worker.forget)
    _end = _by_all(Worker.end)

    def end(self, number: int) -> None:
        if number in self._prefills:
            self._end(number)

    def export_kv(self, table: TableInput, num_tokens: int) -> KVReader:
        raise UsageError("KV of a model on several ranks cannot be handed over", "leave --tensor-parallel out")


class OtherRankFailed(DeviceError):
    """Another rank could not load its part of the model, and reported the reason."""


def load_part(path: Path, name: str, config: EngineConfig, ranks: Ranks) -> LoadedModel:
    """Load this rank's part of a model. Raises OtherRankFailed if another rank could not."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    lora = Path(config.lora) if config.lora else None
    precision = Precision(config.dtype, config.weight_dtype)
    try:
        part_of = partial(RankShard, ranks=ranks)
        loaded = load_model(path, name, ranks.device, precision, config.attention_backend, lora, part_of=part_of)
    except Exception:
        ranks.wait(ranks.rank + 1)  # the others must not wait for this rank
        raise
    if other := ranks.wait(0):
        raise OtherRankFailed(f"rank {other - 1} could not load the model", "see its output above")
    return loaded


def config_of_ranks(config: EngineConfig, size: int, path: Path, device: torch.device) -> EngineConfig:
    """Return the configuration with which every rank loads the model, without values that a rank would measure. Raises
    UsageError for options that are not implemented on several ranks."""
    spec = read_spec(path)
    check_divisible(spec, size)
    if config.weight_dtype != "auto":
        raise UsageError(
            f"--weight-dtype {config.weight_dtype} is not implemented with --tensor-parallel", "omit one of them"
        )
    return replace(
        config,
        tensor_parallel=size,
        dtype=resolve_dtype(config.dtype, device.type, spec, path),
        lora=str(Path(config.lora).expanduser().absolute()) if config.lora else None,
        threads=config.threads or (max(1, torch.get_num_threads() // size) if device.type == "cpu" else None),
    )
