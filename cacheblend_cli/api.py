"""What the CLI calls and what Python users import: load an engine, precompute documents, ask questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import fallback_reason
from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, StoreError
from cacheblend_store.format.codecs import is_lossless
from cacheblend_store.format.layouts import CODECS

from cacheblend_cli.collect.precompute import (
    PlannedChunk,
    PrecomputeEvent,
    PrecomputeOptions,
    PrecomputeReport,
    collect_sequences,
    precompute,
    store_chunk,
)
from cacheblend_cli.collect.prefill import collect, collect_prefix
from cacheblend_cli.collect.recheck import RecheckReport, recheck
from cacheblend_cli.corpus.contexts import prefer_exact
from cacheblend_cli.corpus.documents import read_documents, source_name
from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.kv.pool import bytes_per_token
from cacheblend_cli.model.loading import LoadedModel, load_model, resolve_device, resolve_model
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput
from cacheblend_cli.prompt.template import PromptTemplate, split_template
from cacheblend_cli.runtime.answer import Answer
from cacheblend_cli.runtime.ask import Request, answer, check_length, plan_of, resolve_chunks
from cacheblend_cli.runtime.config import BlendConfig, EngineConfig
from cacheblend_cli.runtime.controller import Controller, Observed, check_auto, decided, kv_bytes
from cacheblend_cli.runtime.memory import DeviceMemory, reserve
from cacheblend_cli.runtime.sampling import SamplingParams

__all__ = [
    "Answer",
    "AskPlan",
    "BlendConfig",
    "Engine",
    "EngineConfig",
    "PrecomputeEvent",
    "PrecomputeOptions",
    "PrecomputeReport",
    "RecheckReport",
    "SamplingParams",
]


@dataclass(frozen=True)
class AskPlan:
    """What `ask --dry-run` says: tokens by kind, bytes of KV to load, and what --ratio auto decides (see AutoReport)."""

    prompt_tokens: int
    cached_tokens: int
    exact_tokens: int
    fresh_tokens: int
    kv_bytes: int
    chunks: list[dict[str, Any]]
    auto: dict[str, Any] | None = None


class Engine:
    """A loaded model and its prompt template. Not thread-safe; use one a thread."""

    def __init__(self, model: LoadedModel, config: EngineConfig, model_load_s: float) -> None:
        self.model, self.config, self.model_load_s = model, config, model_load_s
        self._progress: Callable[[str], None] | None = None
        self._memory: DeviceMemory | None = None
        self._notice: Callable[[str], None] = lambda text: None
        self._controllers: dict[str, Controller] = {}
        self.template: PromptTemplate = split_template(model.tokenizer)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> Engine:
        """Load the model. progress: told what takes time; notice: told what takes time once on a machine.

        Raises NotFoundError, UsageError or DeviceError.
        """
        start = time.perf_counter()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = resolve_device(config.device)
        if config.model is None:
            from cacheblend_cli.demo import model_dir

            path, name = model_dir(), "demo"
        else:
            path, name = resolve_model(config.model), config.model
        if progress:
            progress(f"loading {name}")
        model = load_model(path, name, device, config.dtype, config.attention_backend)
        engine = cls(model, config, 0.0)
        if config.kv_pool_dtype == "float8_e4m3":
            model.decoder.kv_scales = calibrate(model.decoder, engine.template.prefix_ids, config.block_size)
        engine.model_load_s = time.perf_counter() - start
        engine._progress = progress
        engine._notice = notice or engine._notice
        if slower := fallback_reason(config.attention_backend, device):
            engine._notice(slower)
        return engine

    def memory(self) -> DeviceMemory | None:
        """The GPU's pool and decode graphs, taken when they are first needed; None on CPU. Raises DeviceError."""
        if self._memory is None and self.model.decoder.device.type == "cuda":
            if self._progress:
                self._progress(
                    "warming the GPU up: a first run on a machine compiles the kernels, later ones find them"
                )
            self._memory = reserve(
                self.model.decoder,
                self.config.block_size,
                self.config.gpu_memory_utilization,
                eager=self.config.eager,
            )
        return self._memory

    def collection(self, salt: str = "", kv_dtype: str | None = None) -> Collection:
        """What the keys of this engine's chunks are made of."""
        return Collection.of(self.model, self.template.prefix_ids, kv_dtype or self.config.kv_dtype, salt)

    def collection_ids(self, salt: str = "") -> list[str]:
        """The collections whose chunks this engine can use as they are: one a codec, or the one that was asked for."""
        names = CODECS if self.config.kv_dtype == "auto" else (self.config.kv_dtype,)
        return [self.collection(salt, codec).id for codec in names]

    def describe(self) -> dict[str, Any]:
        """Facts for `doctor`."""
        spec = self.model.spec
        return {
            "name": self.model.name,
            "path": str(self.model.path),
            "architecture": spec.architecture,
            "layers": spec.num_layers,
            "parameters": self.model.decoder.num_bytes // self.model.decoder.dtype.itemsize,
            "dtype": str(self.model.decoder.dtype).removeprefix("torch."),
            "device": str(self.model.decoder.device),
            "attention_backend": self.model.decoder.kernels.name,
            "context": spec.max_position_embeddings,
            "rope": spec.rope["rope_type"],
            "kv_bytes_per_token": int(bytes_per_token(self.model.decoder)),
            "fingerprint": self.model.fingerprint,
        }

    def precompute(
        self,
        store: ChunkStore | None,
        paths: Sequence[str],
        options: PrecomputeOptions,
        on_event: Callable[[PrecomputeEvent], None],
    ) -> PrecomputeReport:
        """Bring the store up to date with the documents under `paths`. store None: a dry run."""
        self._check_chunk_tokens(options.chunk_tokens)
        roots = [source_name(Path(p)) for p in paths if p != "-" and Path(p).is_dir()]
        return precompute(
            self.model,
            self.collection(options.salt, options.kv_dtype if options.kv_dtype != "auto" else None),
            store,
            read_documents(paths),
            options,
            on_event,
            self.config.block_size,
            roots,
        )

    def recheck(
        self,
        store: ChunkStore,
        count: int,
        *,
        repair: bool = False,
        salt: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> RecheckReport:
        """Compute `count` random chunks of this model again and compare them with the store."""
        collection = self.collection(salt)
        return recheck(self.model, collection, store, count, self.config.block_size, repair=repair, progress=progress)

    def ask(
        self,
        store: ChunkStore | None,
        question: str,
        chunks: Sequence[bytes],
        blend: BlendConfig,
        sampling: SamplingParams,
        *,
        on_text: Callable[[str], None] | None = None,
        verify: bool = False,
        save_holes: bool = True,
        salt: str = "",
        auto: bool = False,
    ) -> Answer:
        """Answer a question over the chunks with these keys, in this order. Blending never changes stored KV.

        Holes (chunks without usable KV) are computed, and with save_holes collected and stored afterwards, when the
        store is open for writing. What was used is noted for the store's eviction (`ChunkStore.touch`). auto: the
        loading controller picks the ratio, blend.ratio being its floor, or a full prefill; it measures this machine when
        it is first needed. Raises NotFoundError for an unknown chunk, UsageError for an empty question.
        """
        memory = self.memory()
        started = time.perf_counter()
        notes: list[str] = []
        collection, request = self.request(store, question, chunks, blend, sampling, salt, notes)
        controller = None
        if auto and blend.mode == "blend":
            resolved = time.perf_counter()
            controller, wanted = self._controller(store, collection, request), request
            started += time.perf_counter() - resolved  # measuring this machine, once, is no part of an answer
            report = controller.decide(collection, request, time.perf_counter() - started)
            request = replace(request, blend=decided(blend, report.decision))
        result = answer(
            self.model,
            collection,
            store,
            request,
            self.config.block_size,
            notes,
            started,
            self.model_load_s,
            on_text,
            verify,
            memory,
        )
        if controller is not None:
            result.auto = replace(report, ttft_s=result.timing.ttft_s)
            seen = Observed.of_answer(result, report.before_s, self.model.decoder.device.type)
            controller.learn(report, collection, wanted, seen)
        if store is not None and result.mode != "full":  # before holes are stored, which may need room
            store.touch([bytes.fromhex(c.id) for c in result.chunks if c.status != "computed"])
            if request.prefix_cached:
                store.touch([collection.prefix_key])
        if save_holes and store is not None and store.writable and result.mode != "full":
            self._save_holes(store, collection, chunks, result)
        return result

    def plan(
        self,
        store: ChunkStore | None,
        question: str,
        chunks: Sequence[bytes],
        blend: BlendConfig,
        salt: str = "",
        auto: bool = False,
        sampling: SamplingParams | None = None,
    ) -> AskPlan:
        """What `ask` would do, without doing it. Raises as it does for what it would refuse."""
        sampling = sampling or SamplingParams()
        collection, request = self.request(store, question, chunks, blend, sampling, salt, [])
        report = None
        if auto and blend.mode == "blend":
            report = self._controller(store, collection, request).decide(collection, request)
            request = replace(request, blend=decided(blend, report.decision))
        plan = plan_of(self.model, collection, request)
        check_length(self.model, plan.num_tokens, sampling.max_tokens)
        request.blend.policy(self.model.spec.num_layers, request.lossless)
        uses = [
            {
                "id": s.key.hex() if s.key else "",
                "source": s.source,
                "tokens": len(s.token_ids),
                "status": s.status,
            }
            for s in plan.chunks
        ]
        size = kv_bytes(collection, plan)
        told = report.to_dict() if report else None
        return AskPlan(plan.num_tokens, plan.cached_tokens, plan.exact_tokens, plan.fresh_tokens, size, uses, told)

    def request(
        self,
        store: ChunkStore | None,
        question: str,
        chunks: Sequence[bytes],
        blend: BlendConfig,
        sampling: SamplingParams,
        salt: str,
        notes: list[str],
    ) -> tuple[Collection, Request]:
        """The question and its chunks resolved; it can be run under several settings (`replace(request, blend=...)`)."""
        collection = self._collection_of(store, chunks, salt)
        suffix_ids = self.template.suffix_ids(question)
        inputs: tuple[ChunkInput, ...] = resolve_chunks(self.model, collection, store, chunks, notes)
        prefix_cached = store is not None and store.has_kv(collection.prefix_key)
        codecs = {c.codec for c in inputs if c.cached} | {collection.codec}
        lossless = all(is_lossless(codec, self.model.decoder.dtype) for codec in codecs)
        return collection, Request(suffix_ids, inputs, blend, sampling, prefix_cached, lossless)

    def prefer_exact(self, store: ChunkStore, keys: Sequence[bytes], salt: str = "") -> list[bytes]:
        """The chunks with these keys, each from the context that makes it exact at its place, where that is stored."""
        collection = self._collection_of(store, keys, salt)

        def ids_of(key: bytes) -> tuple[int, ...]:
            manifest = _chunk_of(store, key)
            return manifest.token_ids if manifest else ()

        return prefer_exact(keys, ids_of, collection.key, store.has_kv)

    def _controller(self, store: ChunkStore | None, collection: Collection, request: Request) -> Controller:
        """The controller for these chunks' codec, ready for this prompt."""
        check_auto(request.blend)
        controller = self._controllers.get(collection.codec)
        if controller is None:
            size = self.config.block_size
            controller = Controller(self.model, collection.codec, size, self.memory(), self._notice)
            self._controllers[collection.codec] = controller
        controller.ready(collection, store, request)
        return controller

    def _check_chunk_tokens(self, chunk_tokens: int) -> None:
        """Raises UsageError for chunks that do not fit the model's context behind the prompt's prefix."""
        room = self.model.spec.max_position_embeddings - len(self.template.prefix_ids)
        if chunk_tokens > room:
            raise UsageError(
                f"--chunk-tokens {chunk_tokens} is more than the {room} tokens that the context of {self.model.name} has "
                "room for behind the prompt's prefix",
                f"use --chunk-tokens {min(512, room)}",
            )

    def _collection_of(self, store: ChunkStore | None, chunks: Sequence[bytes], salt: str) -> Collection:
        """With kv_dtype auto, the codec is that of the first chunk this model has KV for: what was stored is used."""
        if self.config.kv_dtype == "auto" and store is not None:
            for key in chunks:
                if (manifest := _chunk_of(store, key)) and manifest.model == self.model.fingerprint:
                    return self.collection(salt, manifest.codec)
        return self.collection(salt)

    def _save_holes(self, store: ChunkStore, collection: Collection, named: Sequence[bytes], result: Answer) -> None:
        """Collect and store what the answer had to compute: missing chunks, and chunks whose KV was bad."""
        holes = {c.id: c for c in result.chunks if c.status == "computed"}
        if not holes:
            return
        told = f"the KV of {len(holes)} computed chunk{'s' if len(holes) > 1 else ''}"
        keep = {bytes.fromhex(c.id) for c in result.chunks} | {collection.prefix_key}
        try:
            prefix = collect_prefix(self.model.decoder, collection.prefix_ids, self.config.block_size)
            for planned in self._planned_holes(store, collection, named, result):
                [kv] = collect(self.model.decoder, prefix, collect_sequences([planned]), self.config.block_size)
                store_chunk(store, collection, planned, kv, keep)
            result.notes.append(f"stored {told}")
        except (StoreError, DeviceError) as error:  # the answer is there, and stands without
            result.notes.append(f"{told} could not be stored: {error.message}")

    def _planned_holes(
        self, store: ChunkStore, collection: Collection, named: Sequence[bytes], result: Answer
    ) -> list[PlannedChunk]:
        """The computed chunks, each once. named: the keys the question came with, which for a chunk of another model is
        where its text and its place in its document are found."""
        from cacheblend_cli.corpus.chunker import Chunk

        planned: dict[bytes, PlannedChunk] = {}
        at = len(collection.prefix_ids)
        for use, name in zip(result.chunks, named, strict=True):
            ids = tuple(result.prompt_ids[at : at + use.tokens])
            at += use.tokens
            key = bytes.fromhex(use.id)
            if use.status != "computed" or key in planned:
                continue
            own = store.get_chunk(key)
            known = own or store.get_chunk(name)
            if known is None:  # it went while the answer was made
                continue
            left, context = (own.left_context_ids, own.context) if own else ((), "sink")
            chunk = Chunk(known.index, known.text, ids, *known.span)
            planned[key] = PlannedChunk(key, use.source, chunk, left, context)
        return list(planned.values())


def _chunk_of(store: ChunkStore, key: bytes) -> ChunkManifest | None:
    """None when there is none or it is damaged."""
    try:
        return store.get_chunk(key)
    except BadBlob:
        return None
