"""An engine in this process, for commands that answer questions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answer_output import AnswerResult, AnswerStream, End
from cacheblend_cli.cli.output import Output
from cacheblend_cli.model.read_ahead import read_ahead
from cacheblend_cli.settings import Resolved
from cacheblend_cli.types import AskRequest, BlendParams

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.engine.engine import Request
    from cacheblend_cli.types import Answer, AskPlan


class LocalEngine:
    """An engine in this process, for one question after another or many at once."""

    def __init__(self, resolved: Resolved, output: Output, store: ChunkStore) -> None:
        """Load the model. Raises UsageError, NotFoundError, DeviceError."""
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
        self._note = cache(output.note)  # each message once, however many questions

    @property
    def model_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in self._engine.model.files if file.exists())

    @property
    def is_lost(self) -> bool:
        """Return whether a rank has ended, so that it cannot answer any more."""
        return self._engine.is_lost

    def begin(self, ask: AskRequest) -> End:
        """Resolve the request. After `serve`, queue it; otherwise it runs when End is called."""
        from cacheblend_cli.engine.events import Event, Reasoning, Text

        request = self._engine.resolve(self._store, ask, self._note)
        if self._serves:
            answer = self._engine.queue(request)
            return lambda streams: self._result(request, answer.result())

        def end(streams: AnswerStream | None) -> AnswerResult:
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
        return self._engine.plan(self._store, ask, self._note)

    def serve(self, concurrency: int) -> None:
        """Run up to `concurrency` questions at once from now on."""
        from cacheblend_cli.engine.events import Limits

        limits = Limits(max_waiting=2 * concurrency + 1, max_sequences=concurrency)
        self._engine.serve(self._store, limits)
        self._serves = True

    def close(self) -> None:
        self._engine.close()

    def _result(self, request: Request, answer: Answer, shown: Sequence[str] = ()) -> AnswerResult:
        return AnswerResult(answer, request.options, *self._engine.explain(request, answer), shown=shown)
