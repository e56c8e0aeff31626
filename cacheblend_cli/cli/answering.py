"""Who answers the turns of a chat: a running engine, or one in this process, which is loaded for the first question."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answers import Streams
from cacheblend_cli.cli.conversation import Conversation
from cacheblend_cli.cli.inputs import read_ids
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.warm import Flags, answer_of, request_of
from cacheblend_cli.errors import CacheBlendError, ExitCode, PromptTooLong
from cacheblend_cli.server.client import Connection, EngineLost
from cacheblend_cli.server.place import socket_of
from cacheblend_cli.settings import Resolved

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Engine
    from cacheblend_cli.corpus.scopes import Scope


class Answering:
    """by: who answered last, to be said behind the summary. named: keys of chunks in hex, None to search for each question."""

    def __init__(
        self,
        resolved: Resolved,
        output: Output,
        store: ChunkStore,
        scope: Scope,
        named: Sequence[str] | None,
        *,
        local: bool,
    ) -> None:
        self._resolved, self._output, self._store, self._scope = resolved, output, store, scope
        self._named, self._local = named, local
        self._engine: Engine | None = None
        self.by = ""

    def documents(self) -> list[str]:
        """The documents that are searched, as a person standing here calls them."""
        from cacheblend_cli.corpus.places import shown
        from cacheblend_cli.corpus.search import searchable

        return [shown(name) for name in searchable(self._store) if self._scope.holds(name)]

    def ask(self, question: str, talk: Conversation, streams: Streams) -> tuple[str, Any]:
        """The answer's text, and what is known of it. What was said first is forgotten where all of it is too long."""
        named = self._named
        while True:
            try:
                return self._ask(question, talk.history, named, streams)
            except PromptTooLong:
                if not talk.turns:
                    raise
                del talk.turns[0]
                self._output.note("the conversation is too long: its first turn is forgotten")
            except CacheBlendError as error:  # a question such as "why?": it is about what the last one was about
                if error.exit_code != ExitCode.NOT_FOUND or named is not None or talk.last is None:
                    raise
                named = [chunk.id for chunk in talk.last.chunks]

    def _ask(self, question: str, history: list[str], named: Sequence[str] | None, streams: Streams) -> tuple[str, Any]:
        connection = None if self._local or self._engine else Connection.to(socket_of(self._resolved.settings))
        if connection is not None:
            with connection:
                told = self._warm(connection, question, history, named, streams)
            if told is not None:
                return told
        return self._cold(question, history, named, streams)

    def _warm(
        self,
        connection: Connection,
        question: str,
        history: list[str],
        named: Sequence[str] | None,
        streams: Streams,
    ) -> tuple[str, Any] | None:
        """None when the engine is gone before it said anything."""
        pieces: list[str] = []
        first_at: float | None = None
        request = request_of(self._resolved, Flags(), question, named, self._scope, history)
        try:
            for event in connection.request(request):
                if event["event"] == "done":
                    self.by = f", by the engine of process {event['pid']}"
                    return "".join(pieces), answer_of(self._store, event, first_at)
                first_at = first_at or time.perf_counter()
                if event["event"] == "text":
                    pieces.append(event["text"])
                    streams.text(event["text"])
                else:
                    streams.reasoning(event["text"])
        except EngineLost:
            if first_at is not None:
                raise
        return None

    def _cold(
        self, question: str, history: list[str], named: Sequence[str] | None, streams: Streams
    ) -> tuple[str, Any]:
        options.import_engine()
        from cacheblend_cli.api import Lookup, Question
        from cacheblend_cli.runtime.config import BlendConfig
        from cacheblend_cli.runtime.model_sampling import as_the_model, sampling_of

        settings = self._resolved.settings
        blend, sampling = BlendConfig.of(settings), sampling_of(self._resolved)
        if self._engine is None:
            self._engine = options.load_engine(settings, self._output)
        engine = self._engine
        sampling = as_the_model(sampling, self._resolved, engine.model)
        keys = [bytes.fromhex(key) for key in named or ()]
        asked = Question(question, keys, blend, sampling, settings.salt, history=tuple(history))
        if named is None:
            asked = engine.search(self._store, asked, Lookup.of(settings, self._scope))
        self.by = ""
        auto = settings.ratio == "auto"
        answer = engine.ask(self._store, asked, on_text=streams.text, on_reasoning=streams.reasoning, auto=auto)
        return answer.text, answer


@contextmanager
def answering_of(
    resolved: Resolved, output: Output, *, chunks: str | None, source: str | None, everywhere: bool, local: bool
) -> Iterator[Answering]:
    """Over the store of the settings. Raises StoreErrors, and NotFoundError for chunks and documents that are not there."""
    from cacheblend_cli.corpus.scopes import EVERYTHING

    settings = resolved.settings
    with options.store_in_use(settings) as store:
        named = None if chunks is None else [store.resolve(name).hex() for name in read_ids(chunks)]
        scope = (
            EVERYTHING
            if named is not None
            else options.scope_of(store, source, everywhere, output, settings.collection)
        )
        yield Answering(resolved, output, store, scope, named, local=local)
