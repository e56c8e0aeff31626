"""Sources of an answer as annotations of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from cacheblend_cli.server.preprocessing import Origin
from cacheblend_cli.types import Answer, ChunkUse

_DIGITS = 12  # of a chunk id in a URL


def annotations_of(answer: Answer, origins: Sequence[Origin], page: str) -> list[dict[str, Any]]:
    """Return a citation at each claim that a chunk has, in the order of the text, then one for each other chunk, best
    first as on the page.

    The latter are at the end of the text and empty: clients insert a mark at a citation's end or replace its text, and
    a citation of the whole answer would replace all of it. Passages of the messages are not cited: the client that
    sent them shows its own sources.

    origins: one per chunk. page: URL of the server's page.
    """
    places = [(claim.chunk, claim.start, claim.end) for claim in answer.claims if claim.chunk is not None]
    cited, end = {chunk for chunk, _, _ in places}, len(answer.text)
    rest = [i for i in range(len(answer.chunks)) if i not in cited]
    places += [(i, end, end) for i in sorted(rest, key=lambda i: answer.chunks[i].rank or len(answer.chunks) + 1)]
    return [
        _citation(answer.chunks[i], origins[i], page, start, stop)
        for i, start, stop in places
        if not origins[i].in_message
    ]


def _citation(chunk: ChunkUse, origin: Origin, page: str, start: int, stop: int) -> dict[str, Any]:
    title = ", ".join(filter(None, (origin.title or origin.document, chunk.place)))
    url = (
        f"{page}#{quote(title, safe='')}/{chunk.id[:_DIGITS]}"  # never a name, which who wrote the text may have chosen
    )
    return {
        "type": "url_citation",
        "url_citation": {"start_index": start, "end_index": stop, "title": title, "url": url},
    }
