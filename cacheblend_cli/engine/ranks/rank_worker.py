"""A rank other than 0: it runs the messages of rank 0's driver and workers (ranks/driver.py) and of its collector
(collect/prefill.py)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from cacheblend_store import ChunkStore, StoreError

from cacheblend_cli.collect.prefill import CollectPieces, NewPlace, Places
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.ranks.driver import (
    ARGUMENTS,
    Begin,
    Calibrate,
    Call,
    Drop,
    LoadModel,
    NewWorker,
    OtherRankFailed,
    Reserve,
    load_part,
)
from cacheblend_cli.engine.ranks.rank_group import STARTED, join
from cacheblend_cli.engine.worker.decode import EagerRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory, reserve
from cacheblend_cli.engine.worker.prefill import PrefillInput
from cacheblend_cli.engine.worker.worker import Worker
from cacheblend_cli.errors import CacheBlendError, ExitCode
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.ranks import Ranks, is_agreed

RankMessage = LoadModel | Calibrate | Reserve | NewWorker | Begin | Call | Drop | NewPlace | CollectPieces
_decode = msgspec.msgpack.Decoder(RankMessage).decode


class Follower:
    """Another rank: runs the messages of rank 0 until the last one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._models: dict[int, tuple[Decoder, EngineConfig]] = {}
        self._memories: dict[int, DeviceMemory] = {}  # of GPUs
        self._workers: dict[int, Worker] = {}
        self._stores: dict[tuple[int, int], ChunkStore] = {}
        self._places = Places()

    def run(self) -> None:
        while message := self._ranks.receive():
            try:
                self._do(_decode(message))
            except Exception as error:
                if not is_agreed(error):
                    raise

    def _do(self, message: RankMessage) -> None:
        match message:
            case LoadModel(model, path, config):
                self._load(model, path, config)
            case Calibrate(model, prefix_ids):
                decoder, config = self._models[model]
                decoder.kv_scales = calibrate(decoder, prefix_ids, config.block_size)
            case Reserve(model, num_prompts):
                self._memories[model] = reserve(*self._models[model], num_prompts=num_prompts)
            case NewWorker(worker, model, num_blocks, block_size):
                decoder, memory = self._models[model][0], self._memories.get(model)
                if memory is None:
                    pool = KVPool.of(decoder, num_blocks, block_size)
                    memory = DeviceMemory(pool, EagerRunner(decoder, pool))
                self._workers[worker] = Worker(decoder, memory)
            case Begin(worker, given, folder):
                self._begin(worker, given, folder)
            case Call(worker, method, raw):
                arguments = msgspec.msgpack.decode(raw, type=ARGUMENTS[method])
                getattr(self._workers[worker], method)(*arguments)
                if method == "end" and (store := self._stores.pop((worker, *arguments), None)) is not None:
                    store.close()
            case Drop(models, workers):
                for number in workers:
                    self._workers.pop(number, None)
                for number in models:
                    self._models.pop(number, None)
                    self._memories.pop(number, None)
            case NewPlace() | CollectPieces():
                self._places.do(self._models[message.model][0], message)

    def _load(self, model: int, path: str, config: EngineConfig) -> None:
        try:
            self._models[model] = load_part(Path(path), path, config, self._ranks).decoder, config
        except OtherRankFailed:
            pass
        except CacheBlendError as error:
            _write(self._ranks.rank, error)

    def _begin(self, worker: int, given: PrefillInput, folder: str) -> None:
        store = None
        if folder and any(s.cached for s in given.plan.segments):
            try:
                store = ChunkStore.open(Path(folder), mode="read", force=True)
            except StoreError:
                store = None  # all ranks then treat its chunks as missing
        try:
            self._workers[worker].begin(given, store)
        except BaseException:
            if store is not None:
                store.close()
            raise
        if store is not None:
            self._stores[worker, given.number] = store


def _write(rank: int, error: Exception) -> None:
    message = error.message if isinstance(error, CacheBlendError) else f"{type(error).__name__}: {error}"
    sys.stderr.write(f"rank {rank}: {message}\n")
    sys.stderr.flush()


def serve_rank(rank: int, size: int) -> NoReturn:
    """Run another rank in this process, and exit when rank 0 ends."""
    own = STARTED in os.environ  # a terminal or supervisor may signal all processes, and rank 0 ends this one
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if own else (signal.SIGINT,):
        signal.signal(number, signal.SIG_IGN)
    try:
        with torch.inference_mode():
            Follower(join(rank, size)).run()
    except Exception as error:
        _write(rank, error)
        os._exit(ExitCode.DEVICE)
    os._exit(0)  # the interpreter would wait for gloo's threads


if __name__ == "__main__":
    serve_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
