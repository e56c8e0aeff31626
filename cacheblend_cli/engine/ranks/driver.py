"""Driver: a model on all ranks of tensor parallelism, as seen by rank 0."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.ranks.rank_group import RankGroup
from cacheblend_cli.engine.worker.memory import DeviceMemory, reserve
from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.model.loading import LoadedModel, Precision, load_model, resolve_dtype
from cacheblend_cli.model.parallel import check_divisible
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
    at_once: int


class Drop(msgspec.Struct, tag=True):
    """Drop models and workers that rank 0 no longer has."""

    models: list[int]
    workers: list[int]


class Driver:
    """A model on all ranks. model: its number."""

    numbers = itertools.count()
    gone_models, gone_workers = list[int](), list[int]()

    def __init__(self, group: RankGroup) -> None:
        self.group, self.model = group, next(self.numbers)
        weakref.finalize(self, self.gone_models.append, self.model)

    @contextmanager
    def telling(self, message: msgspec.Struct) -> Iterator[None]:
        """Send a message, and run in the context what it requests. An error of rank 0 alone ends the other ranks."""
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

    def reserve(self, decoder: Decoder, config: EngineConfig, at_once: int) -> DeviceMemory:
        """Allocate the pool on every rank's GPU."""
        with self.telling(Reserve(self.model, at_once)):
            return reserve(decoder, config, at_once=at_once)

    def calibrate(self, decoder: Decoder, prefix_ids: tuple[int, ...], block_size: int) -> KVScales:
        """Compute the scales of every rank's float8 pools."""
        with self.telling(Calibrate(self.model, prefix_ids)):
            return calibrate(decoder, prefix_ids, block_size)


class OtherRankFailed(DeviceError):
    """Another rank could not load its part of the model, and has reported why."""


def load_part(path: Path, name: str, config: EngineConfig, ranks: Ranks) -> LoadedModel:
    """Load this rank's part of a model. Raises OtherRankFailed if another rank could not."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    lora = Path(config.lora) if config.lora else None
    precision = Precision(config.dtype, config.weight_dtype)
    try:
        loaded = load_model(path, name, ranks, precision, config.attention_backend, lora)
    except Exception:
        ranks.wait(ranks.rank + 1)  # the others must not wait for this rank
        raise
    if other := ranks.wait(0):
        raise OtherRankFailed(f"rank {other - 1} could not load the model", "see what it wrote above")
    return loaded


def config_of_ranks(config: EngineConfig, size: int, path: Path, device: torch.device) -> EngineConfig:
    """Return the configuration with which every rank loads the model: nothing in it is measured by a rank. Raises
    UsageError for options that are not implemented on several ranks."""
    spec = read_spec(path)
    check_divisible(spec, size)
    for name, value, known in (
        ("--weight-dtype int8", config.weight_dtype, ("auto",)),
        ("--decode-with llama.cpp", config.decode_with, ("auto", "torch")),
    ):
        if value not in known:
            raise UsageError(f"{name} is not implemented with --tensor-parallel", "leave one of the two out")
    return replace(
        config,
        tensor_parallel=size,
        decode_with="torch",
        dtype=str(resolve_dtype(config.dtype, device, spec, path)).removeprefix("torch."),
        lora=str(Path(config.lora).expanduser().absolute()) if config.lora else None,
        threads=config.threads or (max(1, torch.get_num_threads() // size) if device.type == "cpu" else None),
    )
