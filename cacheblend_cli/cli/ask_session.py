"""Answer questions with a running engine, or with one in this process that is loaded for the first question."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answer_output import AnswerResult, AnswerStream, result_of
from cacheblend_cli.cli.engines import LocalEngine, WarmEngine
from cacheblend_cli.cli.inputs import QuestionInput
from cacheblend_cli.cli.output import Output
from cacheblend_cli.client import Client, EngineLost
from cacheblend_cli.corpus.places import SENT
from cacheblend_cli.model.named import default_model
from cacheblend_cli.settings import Resolved
from cacheblend_cli.types import (
    EVERYTHING,
    NEVER_CHECKED,
    AskOptions,
    AskRequest,
    SamplingParams,
    SearchParams,
    TextDocument,
)

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.types import Answer, AskPlan, ChunkPlan

STDIN = "stdin"
"""Source of chunks of a document that was piped to the command."""


@dataclass(frozen=True)
class BatchResult:
    question_input: QuestionInput
    result: AnswerResult | AskPlan | None = None
    error: Exception | None = None


class AskSession:
    """Answers questions over an open store, by a running engine, else (and with `local`) by one that is loaded here. At
    the end that one may leave an engine running. scope: documents to search. sampling: None for that of the settings.
    document: text to answer from, cited as STDIN."""

    def __init__(
        self,
        resolved: Resolved,
        output: Output,
        store: ChunkStore,
        ask_options: AskOptions = AskOptions(),
        *,
        local: bool,
        sampling: SamplingParams | None = None,
        document: str | None = None,
    ) -> None:
        self._resolved, self._options, self._output, self._local = resolved, ask_options, output, local
        self._sampling = sampling
        self._documents = () if document is None else (TextDocument(document),)
        self.store, self.scope = store, EVERYTHING
        self._local_engine: LocalEngine | None = None

    def ask(
        self, question_input: QuestionInput, streams: AnswerStream | None = None, history: Sequence[str] = ()
    ) -> AnswerResult:
        """Return the answer. Raises errors of `ask`, and EngineLost if a running engine ended in the middle of it."""
        ask_request = self._request(question_input, history)
        if (warm := self._running()) is not None:
            self._output.status("waiting for the engine")
            try:
                return self._cited(result_of(warm.events(ask_request), self._options, streams), ask_request)
            except EngineLost:
                if streams is not None and streams.begun:
                    raise
        return self._cited(result_of(self._load().events(ask_request), self._options, streams), ask_request)

    @property
    def is_lost(self) -> bool:
        return self._local_engine is not None and self._local_engine.engine.is_lost

    def plan(self, question_input: QuestionInput) -> AskPlan:
        ask_request = self._request(question_input)
        try:
            plan = (self._running() or self._load()).plan(ask_request)
        except EngineLost:
            plan = self._load().plan(ask_request)
        named = {key.hex() for key in ask_request.keys}

        def is_sent(chunk: ChunkPlan) -> bool:
            return chunk.id not in named and (ask_request.search is None or chunk.source.startswith(SENT))

        if not self._documents:
            return plan
        return replace(plan, chunks=[replace(c, source=STDIN) if is_sent(c) else c for c in plan.chunks])

    def plans(self, questions: Sequence[QuestionInput]) -> Iterator[BatchResult]:
        return _in_order(questions, lambda item: partial(self.plan, item), 1)

    def answers(self, questions: Sequence[QuestionInput], concurrency: int) -> Iterator[BatchResult]:
        """Yield the answers in order, running `concurrency` questions at once. If a running engine ends, the rest is
        answered here."""
        left = deque(questions)
        if (warm := self._running()) is not None:
            try:
                for result in _in_order(questions, partial(self._begin, warm), concurrency):
                    left.popleft()
                    yield result
                return
            except EngineLost as error:
                self._output.note(f"{error.message}; the remaining questions are answered in this process")
        if not left:
            return
        engine = self._load()
        engine.serve(concurrency)
        # queue twice as many, so that the next one's KV loads meanwhile
        yield from _in_order(left, partial(self._begin, engine), 2 * concurrency)

    def _begin(self, engine: WarmEngine | LocalEngine, question_input: QuestionInput) -> Callable[[], AnswerResult]:
        """Send the question. Calling the result waits for the answer."""
        return partial(result_of, engine.events(self._request(question_input)), self._options)

    def __enter__(self) -> AskSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._local_engine is None:
            return
        from cacheblend_cli.cli.keep_alive import leave_engine
        from cacheblend_cli.model.host_memory import resident_memory

        local, self._local_engine, memory = self._local_engine, None, resident_memory()
        on_gpu = local.engine.model.decoder.device.type == "cuda"
        local.engine.close()
        if local.has_answered and kind is None and not self._local:
            leave_engine(self._resolved, self._output, memory, on_gpu=on_gpu)

    def note_model(self) -> None:
        """Say once, on a terminal, which model was used without a setting."""
        options.note_model(self._resolved, self._output)

    def suggest_check(self, answer: Answer) -> None:
        """Suggest once for each model, on a terminal, to measure the ratio that was used by default."""
        inexact = answer.cached_tokens > answer.exact_tokens
        if answer.mode == "blend" and inexact and answer.ratio_from == f"default: {NEVER_CHECKED}":
            name = self._resolved.settings.model or default_model()
            options.hint(
                self._output,
                f"ratio {answer.ratio:g} is the default, not measured for this model: cacheblend models check {name} --ratio-only",
                name=f"ratio of {name}",
            )

    def _cited(self, result: AnswerResult, ask_request: AskRequest) -> AnswerResult:
        """Return the answer with all chunks of the document cited as STDIN, even if the store has them from another
        document."""
        if not self._documents:
            return result
        named = {key.hex() for key in ask_request.keys}
        chunks = [
            replace(c, source=STDIN, place=c.place if c.source.startswith(SENT) else "")
            if c.rank is None and c.id not in named
            else c
            for c in result.answer.chunks
        ]
        return replace(result, answer=replace(result.answer, chunks=chunks))

    def _running(self) -> WarmEngine | None:
        client = None if self._local or self._local_engine else Client.of(self._resolved.settings)
        return None if client is None else WarmEngine(client, self.store)

    def _load(self) -> LocalEngine:
        if self._local_engine is None:
            self._local_engine = LocalEngine(self._resolved, self._output, self.store)
        return self._local_engine

    def _request(self, question_input: QuestionInput, history: Sequence[str] = ()) -> AskRequest:
        """Raises UsageError, ChunkNotFound, AmbiguousId."""
        return AskRequest.of(
            self._resolved,
            question_input.question,
            self._sampling,
            keys=tuple(self.store.resolve(name) for name in question_input.chunks or ()),
            search=SearchParams.of(self._resolved.settings, self.scope) if question_input.chunks is None else None,
            history=tuple(history),
            options=self._options,
            documents=self._documents,
        )


def _in_order(
    questions: Sequence[QuestionInput], begin: Callable[[QuestionInput], Callable[[], Any]], most: int
) -> Iterator[BatchResult]:
    """Yield the results in order, with at most `most` questions running."""
    running: deque[tuple[QuestionInput, Callable[[], Any] | Exception]] = deque()

    def finish_first() -> BatchResult:
        item, end = running.popleft()
        try:
            if isinstance(end, Exception):
                raise end
            return BatchResult(item, end())
        except EngineLost:
            raise
        except Exception as error:
            return BatchResult(item, error=error)

    for item in questions:
        try:
            running.append((item, begin(item)))
        except Exception as error:
            running.append((item, error))
        while len(running) >= most or (running and isinstance(running[0][1], Exception)):
            yield finish_first()
    while running:
        yield finish_first()
