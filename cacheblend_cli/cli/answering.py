"""Answer questions by a running engine, or by one in this process, which is loaded for the first question."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from cacheblend_cli import user_cache
from cacheblend_cli.cli import options
from cacheblend_cli.cli.answers import End, Result, Streams
from cacheblend_cli.cli.inputs import QuestionInput
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.warm import WarmEngine
from cacheblend_cli.client import Client, EngineLost
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.read_ahead import read_ahead
from cacheblend_cli.settings import Resolved
from cacheblend_cli.types import EVERYTHING, AskOptions, AskRequest, BlendParams, SearchParams, sampling_of

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.engine.engine import Request
    from cacheblend_cli.types import Answer, AskPlan

_LARGE = 200_000_000  # bytes of a model that takes long to load


class LocalEngine:
    """An engine in this process, for one question after another or for many side by side."""

    def __init__(self, resolved: Resolved, output: Output, store: ChunkStore) -> None:
        """Load it. Raises UsageError, NotFoundError, DeviceError."""
        if resolved.settings.tier:
            from cacheblend_cli.cli.tier import share

            share(store, resolved.settings, output)
        settings = resolved.settings
        read_ahead(settings)
        options.import_engine()
        from cacheblend_cli.blend.policy import check_names

        check_names(BlendParams.of(resolved.settings))  # before the model is loaded
        self._store, self._engine = store, options.load_engine(resolved.settings, output)
        self._serves = False
        self._say = cache(output.note)  # once, of however many questions

    @property
    def model_bytes(self) -> int:
        """Bytes of the files that its weights were read from."""
        return sum(file.stat().st_size for file in self._engine.model.files if file.exists())

    @property
    def is_lost(self) -> bool:
        """Return whether its ranks have ended, so that it answers no more."""
        return self._engine.is_lost

    def begin(self, ask: AskRequest) -> End:
        """Resolve the request, and after `serve` queue it; otherwise it runs when its answer is waited for."""
        from cacheblend_cli.engine.events import Event, Reasoning, Text

        request = self._engine.resolve(self._store, ask, self._say)
        if self._serves:
            answer = self._engine.queue(request)
            return lambda streams: self._result(request, answer.result())

        def end(streams: Streams | None) -> Result:
            if streams is None:
                return self._result(request, self._engine.run(request))

            def on_event(event: Event) -> None:
                if isinstance(event, Text | Reasoning) and event.index == 0:
                    (streams.text if isinstance(event, Text) else streams.reasoning)(event.text)

            shown = tuple(request.notes)
            streams.notes(shown)
            return self._result(request, self._engine.run(request, on_event), shown)

        return end

    def plan(self, ask: AskRequest) -> AskPlan:
        return self._engine.plan(self._store, ask, self._say)

    def serve(self, concurrency: int) -> None:
        """Answer this many questions at once from now on."""
        from cacheblend_cli.engine.events import Limits

        limits = Limits(max_waiting=2 * concurrency + 1, max_sequences=concurrency)
        self._engine.serve(self._store, limits)
        self._serves = True

    def close(self) -> None:
        self._engine.close()

    def _result(self, request: Request, answer: Answer, shown: Sequence[str] = ()) -> Result:
        return Result(answer, request.options, *self._engine.explain(request, answer), shown=shown)


@dataclass(frozen=True)
class Answered:
    """A question of several, and its answer, plan or error."""

    question_input: QuestionInput
    found: Result | AskPlan | None = None
    error: Exception | None = None


class Answering:
    """Over a store that stays open meanwhile. scope: of what is searched. sampling: fields of SamplingParams beside the
    settings. A running engine is looked for, unless `local`, as long as none was loaded here."""

    def __init__(
        self,
        resolved: Resolved,
        output: Output,
        store: ChunkStore,
        ask_options: AskOptions = AskOptions(),
        *,
        local: bool,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._resolved, self._options, self._output, self._local = resolved, ask_options, output, local
        self._sampling = sampling or {}
        self.store, self.scope = store, EVERYTHING
        self._here: LocalEngine | None = None
        self._keep_alive_s = _seconds(resolved.settings.keep_alive)

    def ask(self, question_input: QuestionInput, streams: Streams | None = None, history: Sequence[str] = ()) -> Result:
        """Raises what `ask` fails of, and EngineLost where a running engine ended in the middle of the answer."""
        ask_request = self._request(question_input, history)
        if (warm := self._warm()) is not None:
            try:
                return warm.begin(ask_request)(streams)
            except EngineLost:
                if streams is not None and streams.begun:
                    raise
        return self._loaded().begin(ask_request)(streams)

    @property
    def is_lost(self) -> bool:
        return self._here is not None and self._here.is_lost

    def plan(self, question_input: QuestionInput) -> AskPlan:
        ask_request = self._request(question_input)
        return (self._running() or self._loaded()).plan(ask_request)

    def plans(self, questions: Sequence[QuestionInput]) -> Iterator[Answered]:
        return _in_order(questions, lambda item: lambda streams: self.plan(item), 1)

    def answers(self, questions: Sequence[QuestionInput], concurrency: int) -> Iterator[Answered]:
        """Yield the answers in order, `concurrency` questions at a time. If a running engine ends, the rest is answered
        here."""
        left = deque(questions)
        if (warm := self._warm()) is not None:
            try:
                for answered in _in_order(questions, lambda item: warm.begin(self._request(item)), concurrency):
                    left.popleft()
                    yield answered
                return
            except EngineLost as error:
                self._output.note(f"{error.message}; the questions that are left are answered here")
        if not left:
            return
        here = self._loaded()
        here.serve(concurrency)
        # twice as many are known, so that the next one's KV loads meanwhile
        yield from _in_order(left, lambda item: here.begin(self._request(item)), 2 * concurrency)

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._here is not None:
            self._here.close()

    def suggest_background(self) -> None:
        """Say once, on a terminal, how the next question is spared loading a model as large as this one's."""
        if self._here is None or self._output.quiet or not self._output.err_tty or self._here.model_bytes < _LARGE:
            return
        place = user_cache.place("hints", "background")
        if not user_cache.recall(place):
            user_cache.keep(place, "shown\n")
            missing = _why_not_served()
            self._output.note(
                "torch and the model were loaded for this answer: `cacheblend serve --background` keeps them loaded for the next ones, "
                f"and so does `cacheblend config set keep_alive 10m`{f' (first: {missing.hint})' if missing else ''}"
            )

    def _warm(self) -> WarmEngine | None:
        """Return the running engine; with keep_alive it is started. Raises CacheBlendError where it cannot start."""
        if (found := self._running()) is not None or self._local or self._here or not self._keep_alive_s:
            return found
        if (missing := _why_not_served()) is not None:
            if self._resolved.origin["keep_alive"] == "flag":
                raise missing
            self._output.note(f"answered without keep_alive: {missing.message} ({missing.hint})")
            return None
        from cacheblend_cli.server.background import start_own

        start_own(self._resolved.settings, self._keep_alive_s, options.flags_of(self._resolved, options.ENGINE))
        self._output.note(
            f"an engine stays in the background for {self._resolved.settings.keep_alive}: cacheblend serve --stop ends it"
        )
        return self._running()

    def _running(self) -> WarmEngine | None:
        client = None if self._local or self._here else Client.of(self._resolved.settings)
        return None if client is None else WarmEngine(client, self.store)

    def _loaded(self) -> LocalEngine:
        if self._here is None:
            self._here = LocalEngine(self._resolved, self._output, self.store)
        return self._here

    def _request(self, question_input: QuestionInput, history: Sequence[str] = ()) -> AskRequest:
        """Raises UsageError, ChunkNotFound, AmbiguousId."""
        return AskRequest.of(
            self._resolved,
            question_input.question,
            sampling_of(self._resolved.settings, **self._sampling),
            keys=tuple(self.store.resolve(name) for name in question_input.chunks or ()),
            search=SearchParams.of(self._resolved.settings, self.scope) if question_input.chunks is None else None,
            history=tuple(history),
            options=self._options,
        )


def _why_not_served() -> UsageError | None:
    """Return the error of `serve` if its extra is not installed."""
    from cacheblend_cli.cli.serve import check_installed

    try:
        check_installed()
    except UsageError as error:
        return error
    return None


def _seconds(keep_alive: str) -> float:
    """Raises UsageError."""
    from cacheblend_cli.cli.sizes import parse_age

    return 0.0 if keep_alive in ("", "0") else parse_age(keep_alive, "--keep-alive")


def _in_order(
    questions: Sequence[QuestionInput], begin: Callable[[QuestionInput], Callable[[None], Any]], most: int
) -> Iterator[Answered]:
    """Yield the results in order, with at most `most` questions running."""
    running: deque[tuple[QuestionInput, Callable[[None], Any] | Exception]] = deque()

    def answered() -> Answered:
        item, end = running.popleft()
        try:
            if isinstance(end, Exception):
                raise end
            return Answered(item, end(None))
        except EngineLost:
            raise
        except Exception as error:
            return Answered(item, error=error)

    for item in questions:
        try:
            running.append((item, begin(item)))
        except Exception as error:
            running.append((item, error))
        while len(running) >= most or (running and isinstance(running[0][1], Exception)):
            yield answered()
    while running:
        yield answered()
