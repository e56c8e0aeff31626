"""State that lives as long as an engine: the model, its prompt template, the device's memory, this machine's speeds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cacheblend_kernels import fallback_reason
from cacheblend_store import ChunkStore
from cacheblend_store.format.blobs import CODECS

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.decode_with import decode_with
from cacheblend_cli.engine.detokenizer import CLOSING_ROOM
from cacheblend_cli.engine.grammar import form_tokenizer
from cacheblend_cli.engine.ranks.driver import Driver, config_of_ranks
from cacheblend_cli.engine.ranks.outer_ranks import num_ranks
from cacheblend_cli.engine.ranks.rank_group import group_of, rank_device
from cacheblend_cli.engine.worker.memory import DeviceMemory, reserve
from cacheblend_cli.errors import PromptTooLong
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.kv.generic_check import check_once
from cacheblend_cli.kv.pool import KVPool, PagedSequence, bytes_per_token
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.device import resolve_device
from cacheblend_cli.model.generic import GENERIC_PATH
from cacheblend_cli.model.generic.decoder import GenericDecoder
from cacheblend_cli.model.kv_scales import checkpoint_scales
from cacheblend_cli.model.loading import LoadedModel, Precision, load_model, resolve_model
from cacheblend_cli.model.machine_speeds import describe as describe_speeds
from cacheblend_cli.model.machine_speeds import why_int8_does_not_pay
from cacheblend_cli.model.model_files import unused_adapter
from cacheblend_cli.model.named import default_model
from cacheblend_cli.model.read_ahead import remember
from cacheblend_cli.prompt import dates
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.records import kept_day
from cacheblend_cli.prompt.template import PromptTemplate, split_template
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer


Say = Callable[[str], None]
SLICE_ROWS, GPU_SLICE_ROWS = 256, 2048
"""Positions of a prefill that one step computes. Fewer let others' tokens come sooner; matrix products with fewer rows
are less efficient."""
_TEMPLATES = 64  # of other wordings that are remembered
_SHARE_FROM_S, _SHARE_EVERY_S = 1.0, 0.2  # from when, and how often, the share of the weights that is read is reported


class Runtime:
    """A loaded model and its prompt template, shared by every request.

    Compute runs in one thread at a time. Templates, collections and token limits are read from any thread: they change
    with their arguments only, and the date that a template prints is one of them. load_s: what loading took. say: told
    what takes time once on a machine. progress: told what takes time. memory: a lasting pool to begin with. driver: of
    the other ranks, with tensor parallelism.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, memory: DeviceMemory | None = None) -> None:
        self.model, self.config = model, config
        wording = Wording.of(model.path, config.prompt, config.system, config.template_var)
        self.template = split_template(model.tokenizer, wording)
        self.load_s = 0.0
        self.driver: Driver | None = None
        self.say: Say = lambda text: None
        self.progress: Say = lambda text: None
        self.controllers: dict[str, Any] = {}  # a loading controller for each codec, see controller.py
        self.decode_with = decode_with(config, model)
        self._memory = memory
        self._templates: dict[tuple[str, date | None], PromptTemplate] = {}  # of other wordings and dates
        self._templates_lock = threading.Lock()

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
        lora = Path(config.lora).expanduser() if config.lora else None
        precision = Precision(config.dtype, config.weight_dtype, round(config.weights_cache_gb * 2**30))
        if (size := num_ranks(config.tensor_parallel)) > 1:
            config = config_of_ranks(config, size, path, device)
            driver = Driver(group_of(size, rank_device(device, 0)))
            runtime = cls(driver.load(path, name, config), config)
            runtime.driver = driver
        else:
            config = replace(config, tensor_parallel=1)
            model = load_model(
                path, name, device, precision, config.attention_backend, lora, progress and _shares(progress, name)
            )
            runtime = cls(model, config)
        if isinstance(runtime.decoder, GenericDecoder):
            check_once(runtime.decoder, runtime.model.fingerprint)
        if config.kv_pool_dtype == "float8_e4m3":
            measured = runtime.decoder, runtime.template.prefix_ids, config.block_size
            if runtime.driver:
                runtime.decoder.kv_scales = runtime.driver.calibrate(*measured)
            else:
                own = checkpoint_scales(runtime.decoder.spec, path, runtime.decoder.device)
                runtime.decoder.kv_scales = own or calibrate(*measured)
        remember(config, "weights", runtime.model.files)
        runtime.load_s = time.perf_counter() - start
        runtime.progress, runtime.say = progress or runtime.progress, say or runtime.say
        if slower := fallback_reason(config.attention_backend, device):
            runtime.say(slower)
        elif device.type == "cuda" and config.attention_backend == "auto" and runtime.model.spec.latent is not None:
            runtime.say(
                f"attention over latents (MLA) on {device} runs on torch's operations: the kernels for GPUs lack it"
            )
        if config.weight_dtype == "int8" and (vain := why_int8_does_not_pay(runtime.model.spec, runtime.decoder.dtype)):
            runtime.say(vain)
        if lora is None and (adapter := unused_adapter(path)):
            runtime.say(adapter)
        return runtime

    def worker_config(self, threads: int) -> EngineConfig:
        """Return the configuration that loads the same model, in the same dtypes, elsewhere with so many CPU
        threads."""
        name, dtype = self.model.name, str(self.decoder.dtype).removeprefix("torch.")
        name = str(Path(name).absolute()) if Path(name).exists() else name
        return replace(self.config, model=name, dtype=dtype, threads=threads)

    @property
    def decoder(self) -> Decoder:
        return self.model.decoder

    def memory(self, at_once: int = 1) -> DeviceMemory | None:
        """The GPU's pool and decode graphs, taken when they are first needed; None on CPU. Raises DeviceError.

        at_once: prompts that it holds at a time, where it is taken now.
        """
        if self._memory is None and self.decoder.device.type == "cuda":
            self.progress("warming the GPU up: a first run on a machine compiles the kernels, later ones find them")
            take = reserve if self.driver is None else self.driver.reserve
            self._memory = take(self.decoder, self.config, at_once=at_once)
        return self._memory

    def new_sequence(self, num_tokens: int) -> PagedSequence:
        """A sequence in the lasting pool, or in one of its own. Raises DeviceError that says how much would fit."""
        memory, size = self.memory(), self.config.block_size
        pool = KVPool.of(self.decoder, -(-num_tokens // size), size) if memory is None else memory.pool
        return pool.new_sequence(num_tokens)

    def template_of(self, wording: Wording | None = None, day: date | None = None) -> PromptTemplate:
        """Template with this wording and date. None for either: the engine's own. A template that prints no date
        ignores `day`. Raises UsageError where the chat template cannot render the wording."""
        own = self.template
        wording, day = wording or own.wording, own.day and (day or own.day)
        if wording == own.wording and day == own.day:
            return own
        key = (json.dumps(wording.to_dict(), sort_keys=True), day)
        with self._templates_lock:
            if key not in self._templates:
                while len(self._templates) >= _TEMPLATES:
                    self._templates.pop(next(iter(self._templates)))
                self._templates[key] = split_template(self.model.tokenizer, wording, day)
            return self._templates[key]

    @cached_property
    def form_tokenizer(self) -> LLTokenizer:
        """Tokenizer of grammars, built once. Raises UsageError if llguidance is not installed."""
        return form_tokenizer(self.model)

    def collection(
        self, salt: str = "", kv_dtype: str | None = None, wording: Wording | None = None, day: date | None = None
    ) -> Collection:
        """Collection whose keys depend on these values. kv_dtype, wording, day: None for the engine's."""
        return Collection.of(self.model, self.template_of(wording, day), kv_dtype or self.config.kv_dtype, salt)

    def day(self, store: ChunkStore | None, salt: str = "") -> date | None:
        """Date for the template to print: the one that the store keeps for the salt, else today. None where the
        template prints no date."""
        if self.template.day is None:
            return None
        kept = kept_day(store, self.collection(salt)) if store is not None else None
        return kept or dates.today()

    def collections(self, salt: str = "", wording: Wording | None = None, day: date | None = None) -> list[Collection]:
        """Collections whose chunks can be used: one per codec, or the one that was asked for; then those that the same
        model computed in other dtypes."""
        names = CODECS if self.config.kv_dtype == "auto" else (self.config.kv_dtype,)
        of = self.collection(salt, wording=wording, day=day)
        own = [of.in_codec(codec) for codec in names]
        return own + [other for collection in own for other in collection.in_other_dtypes()]

    @property
    def slice_rows(self) -> int:
        """Positions of a prefill slice, a multiple of the block size. KV and logits are the same to the bit for prompts
        cut alike."""
        rows = SLICE_ROWS if self.decoder.device.type == "cpu" else GPU_SLICE_ROWS
        return max(rows, self.config.block_size)

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer at most."""
        return self.model.spec.max_context

    def reasoning_budget(self, sampling: SamplingParams) -> int | None:
        """Tokens that the model may reason for beside its answer's; None where it does not, or has none of its own."""
        return sampling.reasoning_tokens if self.template.may_reason else None

    def max_new_tokens(self, sampling: SamplingParams) -> int:
        """Tokens that an answer takes at most, with its reasoning."""
        budget = self.reasoning_budget(sampling)
        return sampling.max_tokens + (0 if budget is None else budget + CLOSING_ROOM)

    def fits(self, num_tokens: int, headroom: int) -> bool:
        """Return whether a prompt and the answer's `headroom` fit the model's context."""
        return num_tokens + headroom <= self.context

    def check_characters(self, num_characters: int, headroom: int) -> None:
        """Raises PromptTooLong for texts that do not fit the model's context however they are tokenised. It costs
        nothing, so it goes before everything else that is done with a text."""
        if self.fits(num_characters, headroom):
            return
        least = num_characters // self.model.tokenizer.longest_token  # takes a while the first time
        if not self.fits(least, headroom):
            raise PromptTooLong(
                f"the prompt has {num_characters:,} characters, which is {least:,} tokens at the least, and the context of "
                f"{self.model.name} is {self.context}",
                "ask with fewer or shorter documents, or a shorter question",
            )

    def check_length(self, num_tokens: int, headroom: int) -> None:
        """Raises UsageError when a prompt and the answer's `headroom` do not fit the model's context."""
        if not self.fits(num_tokens, headroom):
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and the answer up to {headroom}, "
                f"and the context of {self.model.name} is {self.context}",
                "ask with fewer chunks, a shorter question or a smaller --max-tokens",
            )

    def describe(self) -> dict[str, Any]:
        """Facts for `doctor`."""
        spec, decoder = self.model.spec, self.decoder
        return {
            "name": self.model.name,
            "path": str(self.model.shown_path),
            **({"lora": str(self.model.lora)} if self.model.lora else {}),
            "architecture": spec.architecture,
            "layers": spec.num_layers,
            **({"computed_by": GENERIC_PATH} if spec.generic else {}),
            "parameters": decoder.num_parameters,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": str(decoder.device),
            "attention_backend": decoder.kernels.name,
            "context": self.context,
            "rope": spec.rope["rope_type"],
            "prompt": self.template.wording.source(self.model.path),
            "kv_bytes_per_token": int(bytes_per_token(decoder)),
            "fingerprint": self.model.fingerprint,
            **(describe_speeds(spec, decoder.dtype, self.model.weight_dtype) if decoder.device.type == "cpu" else {}),
        }


def load_worker_model(config: EngineConfig) -> LoadedModel:
    """Load the model on a worker."""
    return Runtime.load(config).model


def _shares(progress: Say, name: str) -> Callable[[float], None]:
    """Report the share of a model that is loaded, of one that takes longer than a moment."""
    due = time.monotonic() + _SHARE_FROM_S

    def update(share: float) -> None:
        nonlocal due
        if time.monotonic() >= due:
            progress(f"loading {name}: {share:.0%}")
            due = time.monotonic() + _SHARE_EVERY_S

    return update
