"""Engine: a loaded model. The command line, the server and Python programs run models only through this class."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from cacheblend_store import ChunkStore
from torch import Tensor

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.documents import Documents
from cacheblend_cli.engine.engine_thread import first_answer
from cacheblend_cli.engine.events import Done, Event, Failed, OnEvent, Say
from cacheblend_cli.engine.features.auto_ratio import decided, kv_bytes
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.outer_ranks import outer_ranks
from cacheblend_cli.engine.profile import own_blend
from cacheblend_cli.engine.request.chunks import ChunkRecords
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.engine.request.retrieval import Retrieved, retrieve
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.sampling import Draw, draws_of
from cacheblend_cli.errors import QueueFull, UsageError
from cacheblend_cli.model.generic import GENERIC_PATH
from cacheblend_cli.model.text_stream import token_texts
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.settings import DEFAULTS, grouped, of_settings
from cacheblend_cli.types import (
    Answer,
    AskOptions,
    AskPlan,
    AskRequest,
    BlendParams,
    ChunkPlan,
    Piece,
    SamplingParams,
    TokenUse,
    ask_request,
    overridden,
)

if TYPE_CHECKING:
    from cacheblend_cli.engine.connectors.transformers import PrefilledPrompt

_FULL_S = 0.05  # between two attempts to queue a request
_OF_ENGINE = {*grouped("model", "machine", "decoding", "memory", "prompt", "cutting"), "context"}


class Engine(Documents):
    """A loaded model. `ask`, `stream`, `ask_many`, `add` and their async forms run in a thread of the engine: they may
    be called from any thread, and requests that are made at the same time are batched. `close` ends that thread; an
    Engine is a context manager. All other methods compute in the caller's thread; use them in one thread at a time."""

    @classmethod
    def load(
        cls,
        model: str | EngineConfig | None = None,
        *,
        progress: Say | None = None,
        notice: Say | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a model: a directory, a GGUF file, a Hugging Face id, "smollm2" or "handbook".

        settings: by the names of `cacheblend config show` (device, dtype, threads, ratio, max_tokens, ...); files and
        environment variables are not read. model may also be an EngineConfig. progress: callback for messages about
        slow steps; notice: for those that run once per machine. Raises NotFoundError, UsageError or DeviceError.

        In a process that torchrun started as a rank other than 0, this does not return: it serves rank 0 until rank 0
        ends, and exits. tensor_parallel=1 loads the whole model in every process.
        """
        if isinstance(model, EngineConfig):
            config, resolved = model, overridden(DEFAULTS, settings)
        else:
            resolved = overridden(DEFAULTS, {"model": model or "", **settings})
            own = resolved.settings
            config = of_settings(EngineConfig, own, model=own.model or None, lora=own.lora or None)
        serve_other_rank(config.tensor_parallel)
        return cls(Runtime.load(config, progress, notice), resolved)

    @property
    def loaded(self) -> Engine:
        """This engine: see `UnloadedEngine`."""
        return self

    # one request in the caller's thread

    def resolve(
        self,
        store: ChunkStore | None,
        ask: AskRequest,
        say: Say | None = None,
        *,
        suffix_ids: tuple[int, ...] | None = None,
        cancellation: Cancellation | None = None,
    ) -> Request:
        """Look up or search for the chunks of a question, and lay out its prompt. say: callback for a message if search
        by meaning is not available. suffix_ids: token ids after the chunks, None for the template's. Raises
        NotFoundError for an unknown chunk, UsageError for an empty question, StoreErrors, Cancelled."""
        self.runtime.memory()  # first use allocates a GPU's memory, which is not part of an answer's time
        return resolve(self.runtime, store, ask, say, self._collect_settings, suffix_ids, cancellation)

    def run_alone(self, store: ChunkStore | None, ask: AskRequest, options: AskOptions | None = None) -> Answer:
        """Resolve and answer a question in this thread. options: in place of its own."""
        return first_answer(self._alone(self.resolve(store, replace(ask, options=options or ask.options))))

    def plan_of(self, request: Request) -> AskPlan:
        """Return a plan of a resolved request, without running it. --ratio auto may measure this machine, so call it in
        the engine's thread if that runs. Raises UsageError if the request would be refused."""
        request, report = decided(self.runtime, request)
        prompt = request.plan
        self.prompts.check_fits(prompt.num_tokens, request.sampling)
        return AskPlan(
            prompt.num_tokens,
            prompt.cached_tokens,
            prompt.exact_tokens,
            prompt.fresh_tokens,
            kv_bytes(request),
            [ChunkPlan(s.key.hex() if s.key else "", s.source, s.num_tokens, s.status) for s in prompt.chunks],
            report if request.options.auto else None,
            request.notes,
        )

    def search(self, store: ChunkStore, ask: AskRequest) -> Retrieved:
        """Return the best stored chunks for a question, in reading order. Raises NotFoundError with the reason if there
        are none."""
        with ChunkRecords(store) as stored:
            return retrieve(self.runtime, store, stored, ask)

    def own_blend(self, blend: BlendParams) -> tuple[BlendParams, str]:
        """Return the blend settings of the model's profile (`--ratio model`), and the source of the ratio."""
        collection = self.runtime.collection()
        return own_blend(collection, blend, collection.codec)

    def explain(self, request: Request, answer: Answer) -> tuple[list[str], list[list[TokenUse]]]:
        """Return the request's optional reports: notes on the model and on differences between the template's text and
        the decoded prompt; and the tokens of each chunk."""
        notes = [GENERIC_PATH] if request.options.explain and self.model.spec.generic else []
        if request.options.explain and request.store is not None:
            texts = [chunk.text for chunk in request.chunks]
            notes += request.collection.template.differences(texts, request.question, answer.prompt_ids)
        uses = []
        for chunk in answer.chunks if request.options.tokens else ():
            texts = token_texts(self.model.tokenizer, answer.prompt_ids[chunk.start : chunk.start + chunk.tokens])
            uses.append(list(map(TokenUse, texts, answer.kinds(chunk))))
        return notes, uses

    # measurements, in the caller's thread

    def hold_prefill(
        self,
        request: Request,
        *,
        headroom: int = 0,
        output_positions: Callable[[PromptPlan], Tensor] | None = None,
        slice_rows: int | None = None,
    ) -> Prefilled:
        """Prefill a request's prompt and hold its KV, which the caller releases: see `Prefilled` and `prefill` in
        engine/measured_prefill.py."""
        return prefill(self.runtime, request, headroom, output_positions, slice_rows)

    # many requests, in the engine's thread

    def outside_answer(self, sampling: SamplingParams, prompt_ids: list[int], on_event: OnEvent) -> SequenceOutput:
        """Return the output for an answer whose tokens another engine draws (`drawn_outside`)."""
        return SequenceOutput(self.runtime, sampling, prompt_ids, on_event)

    def request(self, question: str, *, chunks: Sequence[str] = (), **about: Any) -> AskRequest:
        """Return a request. chunks: ids of stored chunks, or unique prefixes of ids.

        about: documents: texts to answer from, cut and collected when they are first seen; search: how many chunks to
        search for; history: earlier messages, of user and model in turn; verify: compare with a full prefill; and
        settings, which override the engine's, as ratio=0.3 or max_tokens=20. Raises UsageError, ChunkNotFound,
        AmbiguousId."""
        if "inputs_embeds" in about:
            raise UsageError(
                "inputs_embeds is not supported: KV is stored and reused by token ids", "give the prompt as text"
            )
        if wrong := about.keys() & _OF_ENGINE:
            raise UsageError(f"{min(wrong)} is a setting of the engine", f"Engine.load(..., {min(wrong)}=...)")
        self._started()
        assert self._store is not None, "it is opened with the service"
        return ask_request(self._resolved, question, [self._store.resolve(name) for name in chunks], **about)

    def ask(self, question: str | AskRequest, **about: Any) -> Answer:
        """Return the answer. about: as for `request`. Raises NotFoundError, UsageError, StoreErrors and DeviceError."""
        return self._queue(self._asked(question, about)).result()

    def prefill(self, question: str | AskRequest, **about: Any) -> PrefilledPrompt:
        """Prefill a prompt for transformers' `generate`, and generate no answer. Arguments and errors as for `ask`;
        UsageError for a model with latent attention."""
        from cacheblend_cli.engine.connectors.transformers import PrefilledPrompt, TransformersConnector
        from cacheblend_cli.kv.export import check_exportable

        check_exportable(self.model.spec, "transformers")
        taken = TransformersConnector()
        ask = self._asked(question, about)
        request = self._resolved_request(replace(ask, sampling=replace(ask.sampling, max_tokens=1)))
        report = self.service.ask(request.handed_to(taken)).result()
        return PrefilledPrompt(tuple(report.prompt_ids), taken.layers, report, self.model.path)

    def stream(self, question: str | AskRequest, **about: Any) -> Iterator[str]:
        """Yield pieces of the answer as they are generated. Leaving the loop early cancels the request."""
        request = self._resolved_request(self._asked(question, about))
        with closing(self.events(request)) as events:
            yield from (event.text for event in events if isinstance(event, Piece) and not event.reasoning)

    def ask_many(self, questions: Iterable[str | AskRequest], **about: Any) -> list[Answer]:
        """Return the answers in order. Requests are batched, and queued as the engine has room. Raises the error of the
        first request that fails, and cancels the others."""
        answers, running = list[Answer](), deque[Future[Answer]]()
        try:
            for question in questions:
                request = self._resolved_request(self._asked(question, about))
                while True:
                    try:
                        running.append(self.service.ask(request))
                        break
                    except QueueFull:
                        if running:
                            answers.append(running.popleft().result())
                        else:
                            time.sleep(_FULL_S)
            while running:
                answers.append(running.popleft().result())
        finally:
            for future in running:
                future.cancel()
        return answers

    async def ask_async(self, question: str | AskRequest, **about: Any) -> Answer:
        """Answer without blocking the event loop. Cancelling the task cancels the request."""
        left, futures = threading.Event(), list[Future[Answer]]()

        def submit() -> Future[Answer]:
            futures.append(future := self._queue(self._asked(question, about)))
            if left.is_set():
                future.cancel()
            return future

        try:
            return await asyncio.wrap_future(await asyncio.to_thread(submit))
        finally:
            left.set()
            for future in futures:  # queued, though the task may not know it yet
                future.cancel()

    async def stream_async(self, question: str | AskRequest, **about: Any) -> AsyncIterator[str]:
        """Stream without blocking the event loop. Leaving the loop, or cancelling the task, cancels the request."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        left, states = threading.Event(), list[RequestState]()

        def on_event(event: Event) -> None:
            if not left.is_set():
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            request = self._resolved_request(self._asked(question, about))
            states.append(self.service.submit(request, on_event))
            if left.is_set():
                self.service.cancel(states[0])

        try:
            await asyncio.to_thread(submit)
            while not isinstance(event := await events.get(), Done):
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Piece) and not event.reasoning:
                    yield event.text
        finally:
            left.set()
            for state in states:
                self.service.cancel(state)

    def _asked(self, question: str | AskRequest, about: dict[str, Any]) -> AskRequest:
        if not isinstance(question, AskRequest):
            return self.request(question, **about)
        if about:
            raise UsageError(
                "a request was given together with its fields", "give the question as text, or change the request"
            )
        return question

    def _resolved_request(self, ask: AskRequest) -> Request:
        self._started()
        return self.resolve(self._store, ask)

    def _queue(self, ask: AskRequest) -> Future[Answer]:
        request = self._resolved_request(ask)  # starts the engine's thread, if it was closed
        return self.service.ask(request)


def drawn_outside(token_id: int) -> Draw:
    """Return a token that another engine drew, for `Engine.outside_answer`."""
    return draws_of(torch.tensor([token_id]))[0]


def serve_other_rank(tensor_parallel: int) -> None:
    """Serve rank 0 and exit, if torchrun started this process as another rank. tensor_parallel: the setting. Raises
    UsageError."""
    if (outer := outer_ranks(tensor_parallel)) is not None and outer[0]:
        from cacheblend_cli.engine.ranks.rank_worker import serve_rank

        serve_rank(*outer)
