"""Runtime: objects with the lifetime of an engine: model, prompts, device memory, other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cacheblend_kernels import fallback_reason

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.events import Say
from cacheblend_cli.engine.outer_ranks import num_ranks
from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.engine.worker.decode import EagerRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory, reserve
from cacheblend_cli.engine.worker.worker import Worker
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.pool import KVPool, PagedSequence, bytes_per_token
from cacheblend_cli.kv.rows import slice_rows
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.device import resolve_device
from cacheblend_cli.model.generic import GENERIC_PATH
from cacheblend_cli.model.host_memory import available_memory, total_memory
from cacheblend_cli.model.loading import LoadedModel, load_model
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.model_files import unused_adapter
from cacheblend_cli.model.named import default_model
from cacheblend_cli.model.read_ahead import remember
from cacheblend_cli.prompt.collection import kv_facts
from cacheblend_cli.types import SamplingParams, Speeds

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from cacheblend_cli.engine.ranks.driver import Driver
    from cacheblend_cli.engine.worker.grammar import Grammar
    from cacheblend_cli.errors import CacheBlendError
    from cacheblend_cli.model.kv_scales import KVScales


FREE_SHARE = 0.25  # of a CPU's available memory, or of half of all where that is unknown, for a shared pool
_SHARE_FROM_S, _SHARE_EVERY_S = 1.0, 0.2  # first and later reports of the share of weights that is read


class OneProcess:
    """Driver of a model in this process. `ranks.driver.Driver` has the same methods, for a model on several ranks."""

    is_lost = False

    def reserve(self, decoder: Decoder, config: EngineConfig, num_prompts: int) -> DeviceMemory:
        """Allocate the pool of a GPU."""
        return reserve(decoder, config, num_prompts=num_prompts)

    def kv_scales(self, model: LoadedModel, prefix_ids: Sequence[int], config: EngineConfig) -> KVScales:
        """Return the scales of a float8 pool, from the checkpoint or measured."""
        from cacheblend_cli.kv.calibration import calibrate
        from cacheblend_cli.model.kv_scales import checkpoint_scales

        own = checkpoint_scales(model.spec, model.path, model.decoder.device)
        return own or calibrate(model.decoder, prefix_ids, config.block_size)

    def worker(self, decoder: Decoder, memory: DeviceMemory) -> Worker:
        return Worker(decoder, memory)

    def when_lost(self, act: Callable[[CacheBlendError], Any]) -> None:
        """Do nothing: there is no other rank to lose."""

    def drop(self) -> None:
        """Do nothing: there are no other ranks."""


class Runtime(Prompts):
    """A loaded model, its prompts, and the memory of its device, shared by every request. Compute runs in one thread at
    a time."""

    model: LoadedModel

    def __init__(self, model: LoadedModel, config: EngineConfig, memory: DeviceMemory | None = None) -> None:
        """memory: a lasting pool to begin with."""
        super().__init__(model, config)
        self.load_s = 0.0  # seconds that loading took
        self.driver: Driver | OneProcess = OneProcess()
        self.say: Say = lambda text: None  # callback for what takes time once on a machine
        self.progress: Say = lambda text: None  # callback for what takes time
        self.speeds: dict[tuple[str, int], Speeds] = {}  # by codec and length, see features/auto_ratio.py
        self._memory = memory

    @classmethod
    def load(cls, config: EngineConfig, progress: Say | None = None, say: Say | None = None) -> Runtime:
        """Load the model. Raises NotFoundError, UsageError or DeviceError."""
        start = time.perf_counter()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = resolve_device(config.device)
        name = config.model or default_model()
        if progress:
            progress(f"loading {name}")
        path = resolve_model(name, say)
        if (size := num_ranks(config.tensor_parallel)) > 1:
            from cacheblend_cli.engine.ranks.driver import Driver, config_of_ranks

            config, driver = config_of_ranks(config, size, path, device), Driver(size, device)
            runtime = cls(driver.load(path, name, config), config)
            runtime.driver = driver
        else:
            config = replace(config, tensor_parallel=1)
            precision = Precision(config.dtype, config.weight_dtype)
            lora = Path(config.lora).expanduser() if config.lora else None
            shares = progress and _shares(progress, name)
            runtime = cls(load_model(path, name, device, precision, config.attention_backend, lora, shares), config)
        if runtime.model.spec.generic:
            from cacheblend_cli.kv.generic_check import check_once

            check_once(runtime.decoder, runtime.model.fingerprint)
        if config.kv_pool_dtype == "float8_e4m3":
            runtime.decoder.kv_scales = runtime.driver.kv_scales(runtime.model, runtime.template.prefix_ids, config)
        remember(config.model, config.dtype, config.weight_dtype, runtime.model.files)
        runtime.load_s = time.perf_counter() - start
        runtime.progress, runtime.say = progress or runtime.progress, say or runtime.say
        for notice in _notices(runtime.model, config):
            runtime.say(notice)
        return runtime

    def worker_config(self, threads: int) -> EngineConfig:
        """Return the configuration that loads the same model, in the same dtypes, on another machine. threads: its CPU
        threads."""
        name, dtype = self.model.name, str(self.decoder.dtype).removeprefix("torch.")
        name = str(Path(name).absolute()) if Path(name).exists() else name
        return replace(self.config, model=name, dtype=dtype, threads=threads)

    @property
    def decoder(self) -> Decoder:
        return self.model.decoder

    @property
    def async_scheduling(self) -> bool:
        """Return whether decode steps are queued before the host knows the last tokens: on a GPU, in one process."""
        return self.decoder.device.type == "cuda" and self.decoder.part.is_whole

    def memory(self, num_prompts: int = 1) -> DeviceMemory | None:
        """Return the GPU's pool and decode graphs, allocated on first use for `num_prompts` prompts; None on a CPU.
        Raises DeviceError."""
        if self._memory is None and self.decoder.device.type == "cuda":
            self.progress("warming up the GPU: the first run on a machine compiles kernels")
            self._memory = self.driver.reserve(self.decoder, self.config, num_prompts)
        return self._memory

    def memory_for(self, num_blocks: int, num_prompts: int = 1) -> DeviceMemory:
        """Return the pool and decode runner of a core for `num_prompts` prompts: on a GPU the lasting pool, as large as
        the device allows; on a CPU a pool of num_blocks blocks."""
        if (memory := self.memory(num_prompts)) is not None:
            return memory
        size = self.config.block_size
        pool = KVPool.of(self.decoder, num_blocks + -(-EagerRunner.SPARE // size), size)
        return DeviceMemory(pool, EagerRunner(self.decoder, pool))

    def shared_memory(self, num_tokens: int | None, num_prompts: int) -> DeviceMemory:
        """Return the memory of a core with concurrent requests.

        num_tokens: positions of a CPU's pool; None: a whole context per prompt, up to a quarter of the available
        memory. Memory is allocated when it is written to.
        """
        if num_tokens is None:
            ranks = self.decoder.part.ranks.size  # they share the memory
            free = available_memory() or total_memory() // 2
            fits = int(free * FREE_SHARE / (bytes_per_token(self.decoder) * ranks))
            num_tokens = max(self.context, min(fits, num_prompts * self.context))
        return self.memory_for(-(-num_tokens // self.config.block_size), num_prompts)

    def new_sequence(self, num_tokens: int) -> PagedSequence:
        """Return a sequence in the lasting pool, or in its own. Raises DeviceError, naming what would fit."""
        memory, size = self.memory(), self.config.block_size
        pool = KVPool.of(self.decoder, -(-num_tokens // size), size) if memory is None else memory.pool
        return pool.new_sequence(num_tokens)

    @cached_property
    def form_tokenizer(self) -> LLTokenizer:
        """Tokenizer for grammars, created once. Raises UsageError if llguidance is not installed."""
        from cacheblend_cli.engine.worker.grammar import form_tokenizer

        return form_tokenizer(self.model)

    def grammar_of(self, params: SamplingParams) -> Grammar:
        """Return the grammar for the requested form of an answer. Raises UsageError."""
        if self.template.opens_reasoning:
            raise UsageError(
                f"{self.model.name} reasons before it answers, which a grammar does not allow",
                "leave --json-schema and --regex out",
            )
        from cacheblend_cli.engine.worker.grammar import grammar_of

        return grammar_of(self.form_tokenizer, params)

    @property
    def slice_rows(self) -> int:
        """Positions of a prefill slice, a multiple of the block size."""
        return max(slice_rows(self.decoder), self.config.block_size)

    def describe(self) -> dict[str, Any]:
        """Return facts for `doctor`."""
        spec, decoder = self.model.spec, self.decoder
        return {
            "name": self.model.name,
            "path": str(self.model.shown_path),
            **({"lora": str(self.model.lora)} if self.model.lora else {}),
            "architecture": spec.architecture,
            "layers": spec.num_layers + sum(spec.recurrent),
            **({"computed_by": GENERIC_PATH} if spec.generic else {}),
            "parameters": decoder.num_parameters,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": str(decoder.device),
            "attention_backend": decoder.kernels.name,
            "context": self.context,
            "rope": spec.rope["rope_type"],
            "prompt": self.template.wording.source(self.model.path),
            **kv_facts(spec, self.config.kv_dtype, decoder.dtype, bytes_per_token(decoder)),
            "fingerprint": self.model.fingerprint,
        }


def load_worker_model(config: EngineConfig) -> LoadedModel:
    return Runtime.load(config).model


def _shares(progress: Say, name: str) -> Callable[[float], None]:
    """Return a callback that reports loading progress, if loading takes a while."""
    due = time.monotonic() + _SHARE_FROM_S

    def update(share: float) -> None:
        nonlocal due
        if time.monotonic() >= due:
            progress(f"loading {name}: {share:.0%}")
            due = time.monotonic() + _SHARE_EVERY_S

    return update


def _notices(model: LoadedModel, config: EngineConfig) -> Iterator[str]:
    """Yield messages for users on how this machine computes the model."""
    device = model.decoder.device
    if slower := fallback_reason(config.attention_backend, device):
        yield slower
    elif device.type == "cuda" and config.attention_backend == "auto" and model.spec.latent is not None:
        yield f"attention over latents (MLA) on {device} runs on torch's operations: the GPU kernels do not support it"
    if not config.lora and (adapter := unused_adapter(model.path)):
        yield adapter
