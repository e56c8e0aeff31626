"""Claims of an answer, looked up in the texts of its prompt (`claims/`), and `--on-unsupported refuse`.

`claims/` is imported after the answer's first token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.request.request import Request, RequestChunk
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import UnsupportedClaims
from cacheblend_cli.types import Answer, Claim, unsupported_line

if TYPE_CHECKING:
    from cacheblend_cli.claims.passages import Passages


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    looks_up = request.chunks and request.connector is None and request.options.on_unsupported != "confirm"
    return request, Claims(runtime, request) if looks_up else None


@dataclass(frozen=True)
class Review:
    """Claims of an answer, looked up."""

    claims: list[Claim]
    unsupported: str  # line of those that no text has
    is_whole: bool  # it was not cancelled
    held_by: int | None  # chunk with the question's words, if the answer says that the texts lack it


class Claims(Hook):
    """The claims of each answer of a request."""

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime, self._request = runtime, request
        self._refuses = request.options.on_unsupported == "refuse"
        self.holds_back = self._refuses
        self._reviews = dict[str, Review]()  # by text
        self._passages: Passages | None = None

    def review(self, texts: Sequence[str], is_cancelled: Callable[[], bool]) -> Callable[[], None] | None:
        def look_up() -> None:
            from cacheblend_cli.claims.passages import Passages

            passages = self._passages = self._passages or Passages(*self._texts, is_cancelled)
            for text in texts:
                if text not in self._reviews:
                    self._reviews[text] = self._review(text, passages, is_cancelled)

        return look_up if texts else None

    def is_marked(self, text: str) -> bool:
        """Return whether a claim is in no text of the prompt, or the answer is that the texts lack it while a chunk has
        the question's words."""
        review = self._reviews[text]
        return bool(review.unsupported) or review.held_by is not None

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        """Raises UnsupportedClaims if the answer has some and these are refused."""
        review = self._reviews[answer.text]
        answer.claims = review.claims
        if self._refuses and (review.unsupported or not review.is_whole):
            raise UnsupportedClaims(
                f"the answer is withheld: {review.unsupported or 'it ended before it was looked up'}",
                "show it with --on-unsupported answer, or ask in other words",
            )
        for note in self._notes(report, review, answer):
            if note not in answer.notes:  # all answers of a request share them
                answer.notes.append(note)

    def _notes(self, report: PrefillReport, review: Review, answer: Answer) -> Iterator[str]:
        if review.is_whole and self._passages is not None and (left := self._passages.num_left_out):
            yield f"{left} of the figures, names and quotations were not looked up: too many for one request"
        is_full = answer.confirmation is not None or not report.plan.inexact_tokens or answer.ratio == 1
        if review.held_by is not None and not is_full:
            source = answer.chunks[review.held_by].source
            yield f"{source} has the question's words: a full prefill may find the answer (--confirm marked)"

    @cached_property
    def _texts(self) -> tuple[list[str], list[str]]:
        """The texts of the chunks; the question with earlier messages."""
        decode, request = self._runtime.model.tokenizer.decode, self._request
        chunks = [chunk.text or decode(list(chunk.input.token_ids)) for chunk in request.chunks]
        return chunks, [decode(list(request.suffix_ids))]

    def _review(self, text: str, passages: Passages, is_cancelled: Callable[[], bool]) -> Review:
        from cacheblend_cli.claims import check
        from cacheblend_cli.claims.abstention import abstains

        request, claims = self._request, list[Claim]()
        for part in check(text, passages):
            claim = Claim(part.text, part.start, part.end, part.kind, found=part.place is not None)
            if part.place is not None and part.place.passage < len(request.chunks):
                number, start, _ = part.place
                claim = replace(claim, chunk=number, place=_place(request.chunks[number], start))
            if claim.found or not request.sampling.has_form or claim.kind != "quote":  # JSON has quotation marks itself
                claims.append(claim)
        held_by = self._nearest if abstains(text) else None
        return Review(claims, unsupported_line(claims), not is_cancelled(), held_by)

    @cached_property
    def _nearest(self) -> int | None:
        """Chunk that has most of the question's words, if it has enough of them."""
        from cacheblend_cli.claims.abstention import text_with_words_of

        return None if self._request.weak_match else text_with_words_of(self._request.question, self._texts[0])


def _place(chunk: RequestChunk, start: int) -> str:
    """Return the place in words of a character of the chunk's text: its line, if the file's lines are the text's."""
    locator, text = chunk.citation.locator, chunk.text
    first, last = locator.lines
    begin = len(text) - len(text.lstrip())
    if first and start >= begin and text.strip().count("\n") == last - first:
        line = first + text.count("\n", begin, start)
        locator = locator._replace(lines=(line, line))
    return locator.text
