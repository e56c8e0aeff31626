"""Claims of an answer, looked up in the texts of its prompt (`claims/`), and `--on-unsupported refuse`."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.claims import check
from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.request.request import Request, RequestChunk
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import UnsupportedClaims
from cacheblend_cli.types import Answer, Claim, unsupported_line


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    return request, Claims(runtime, request) if request.chunks and request.connector is None else None


class Claims(Hook):
    """The claims of each answer of a request."""

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime, self._refuses = runtime, request.options.on_unsupported == "refuse"
        self.holds_back = self._refuses

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        """Raises UnsupportedClaims if the answer has some and these are refused."""
        answer.claims = claims_of(self._runtime, report.request, answer.text)
        if self._refuses and (line := unsupported_line(answer.claims)):
            raise UnsupportedClaims(
                f"the answer is withheld: {line}", "show it with --on-unsupported answer, or ask in other words"
            )


def claims_of(runtime: Runtime, request: Request, text: str) -> list[Claim]:
    """Look the claims of an answer up in the request's chunks first, then in its question and earlier messages."""
    decode, claims = runtime.model.tokenizer.decode, list[Claim]()
    parts = check(text, [chunk.text or decode(list(chunk.input.token_ids)) for chunk in request.chunks])
    asked = set[tuple[int, int]]()
    if any(part.place is None for part in parts):
        messages = check(text, [decode(list(request.suffix_ids))])
        asked = {(part.start, part.end) for part in messages if part.place is not None}
    for part in parts:
        claim = Claim(part.text, part.start, part.end, part.kind, found=(part.start, part.end) in asked)
        if part.place is not None:
            number, start, _ = part.place
            claim = replace(claim, found=True, chunk=number, place=_place(request.chunks[number], start))
        if claim.found or not request.sampling.has_form or claim.kind != "quote":  # JSON has quotation marks of its own
            claims.append(claim)
    return claims


def _place(chunk: RequestChunk, start: int) -> str:
    """Return the place in words of a character of the chunk's text: its line, if the file's lines are the text's."""
    locator, text = chunk.citation.locator, chunk.text
    first, last = locator.lines
    begin = len(text) - len(text.lstrip())
    if first and start >= begin and text.strip().count("\n") == last - first:
        line = first + text.count("\n", begin, start)
        locator = locator._replace(lines=(line, line))
    return locator.text
