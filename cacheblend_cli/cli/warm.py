"""ask, over the socket of a running engine: the same answer, the same output, and no model loaded. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answers import Explained, Streams, changed, show_answer, show_plan
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import ExitCode
from cacheblend_cli.runtime.clock import since_process_start
from cacheblend_cli.server.client import Connection, EngineLost, named
from cacheblend_cli.server.place import socket_of
from cacheblend_cli.settings import Resolved

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.corpus.scopes import Scope


@dataclass(frozen=True)
class Flags:
    """What `ask` was told beside the question and the settings. source, everywhere: of which documents."""

    source: str | None = None
    everywhere: bool = False
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    verify: bool = False
    confirm: bool = False
    explain: bool = False
    dry_run: bool = False
    ids: bool = False
    save: bool = True
    json: bool = False


class WarmAsk:
    """A question to a running engine. said: whether anything of the answer was shown; exit_code: as of an
    `ask` without an engine."""

    def __init__(self, connection: Connection, resolved: Resolved, flags: Flags, output: Output) -> None:
        self._connection, self._resolved, self._flags, self._output = connection, resolved, flags, output
        self._first_at: float | None = None
        self.said, self.exit_code = False, ExitCode.OK

    @classmethod
    def over(cls, resolved: Resolved, flags: Flags, output: Output) -> WarmAsk | None:
        """None when no engine of this store, model and settings runs."""
        connection = Connection.to(socket_of(resolved.settings))
        return None if connection is None else cls(connection, resolved, flags, output)

    def ask(self, question: str, chunks: Sequence[str] | None) -> bool:
        """Answer as `ask` does. False when the engine is gone before anything was shown: then nothing was done."""
        settings, flags = self._resolved.settings, self._flags
        with self._connection, options.open_store(settings, write=False) as store:
            keys, scope = None, None
            if chunks is None:
                scope = options.scope_of(store, flags.source, flags.everywhere, self._output, settings.collection)
            else:
                keys = [store.resolve(name).hex() for name in chunks]
            request = request_of(self._resolved, flags, question, keys, scope)
            try:
                sources = self._shown(store, request)
            except EngineLost:
                if self.said:
                    raise
                return False
        if not flags.dry_run:
            options.about_demo(settings, self._output, sources)
        return True

    def _shown(self, store: ChunkStore, request: dict[str, Any]) -> list[str]:
        """Show the answer as it comes; the sources of its chunks."""
        flags, streams, sources = self._flags, Streams(self._output, draft=self._flags.confirm), list[str]()
        for event in self._connection.request(request):
            match event["event"]:
                case "text" | "reasoning":
                    self._first_at = self._first_at or time.perf_counter()
                    if not flags.json:
                        self.said = True
                        (streams.text if event["event"] == "text" else streams.reasoning)(event["text"])
                case "plan":
                    self.said = True
                    plan = SimpleNamespace(**event["plan"])
                    _cite(store, plan.chunks, event["keys"])
                    show_plan(plan, self._output, json=flags.json, extra={})  # type: ignore[arg-type]
                case "done":
                    self.said = True
                    streams.end_reasoning()
                    sources = self._show(store, event)
        return sources

    def _show(self, store: ChunkStore, event: dict[str, Any]) -> list[str]:
        flags, answer = self._flags, answer_of(store, event, self._first_at)
        by = f", by the engine of process {event['pid']}"
        told = None
        if event["differences"] is not None:
            told = Explained(event["differences"], [[named(token) for token in chunk] for chunk in event["tokens"]])
        show_answer(answer, self._output, json=flags.json, ids=flags.ids, explain=told, extra={}, by=by)
        self.exit_code = changed(answer)
        return [chunk.source for chunk in answer.chunks]


def request_of(
    resolved: Resolved,
    flags: Flags,
    question: str,
    keys: Sequence[str] | None,
    scope: Scope | None,
    history: Sequence[str] = (),
) -> dict[str, Any]:
    """What is sent. keys: of the chunks, in hex; None to search them in the scope."""
    found = None if scope is None else {**asdict(scope), "linked": sorted(scope.linked)}
    asked = {"op": "ask", "question": question, "keys": keys, "scope": found, "history": list(history)}
    return {**asked, "settings": asdict(resolved.settings), "origin": dict(resolved.origin), **asdict(flags)}


def answer_of(store: ChunkStore, event: dict[str, Any], first_at: float | None) -> Any:
    """The answer of a "done", with the attributes that are shown, its documents called what a person standing here calls
    them. first_at: perf_counter at its first token, None where it has none."""
    record = event["record"]
    process_s = since_process_start(first_at or time.perf_counter())
    for timing in (record["timing"], event["answer"]["timing"]):
        timing |= {"process_s": round(process_s, 6), "model_load_s": 0.0}
    for chunks in (record["chunks"], event["answer"]["chunks"]):
        _cite(store, chunks, event["keys"])
    answer = named(event["answer"])
    answer.to_dict = lambda ids, explain: record
    return answer


def _cite(store: ChunkStore, chunks: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """Give each chunk the name that its document has from here. keys: what was asked for."""
    from cacheblend_store import BadBlob

    from cacheblend_cli.corpus.citations import Citations

    citations = Citations(store)
    for chunk, key in zip(chunks, keys, strict=True):
        try:
            manifest = store.get_chunk(bytes.fromhex(key))
        except BadBlob:
            continue
        if manifest is not None:
            chunk["source"] = citations.of(manifest).source
