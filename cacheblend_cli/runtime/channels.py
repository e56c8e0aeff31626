"""gpt-oss's channels as think tags: what it says on the channel `final` is the answer, on any other reasoning."""

from __future__ import annotations

from cacheblend_cli.model.text_stream import TextStream
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.template import CHANNEL, THINK, THOUGHT

START, MESSAGE, END = "<|start|>", "<|message|>", "<|end|>"
FINAL = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
"""What ends reasoning and begins the answer."""


class Channels:
    """Follows `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`, tokens that decoding passes over. What
    stands between a token and `<|message|>` is a header, and said to nobody. Text without any of them is the answer."""

    def __init__(self, marks: dict[int, str]) -> None:
        self._marks = marks
        self._header: str | None = None  # None: not in one
        self._reasoning = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Channels | None:
        """None: the tokenizer has no channels."""
        ids = {mark: tokenizer.token_id(mark) for mark in (START, CHANNEL, MESSAGE, END)}
        marks = {i: mark for mark, i in ids.items() if i is not None and tokenizer.is_silent(i)}
        return cls(marks) if {CHANNEL, MESSAGE} <= set(marks.values()) else None

    def push(self, token_id: int, stream: TextStream) -> str:
        """The text that is certain with this token, think tags in place of channels."""
        mark = self._marks.get(token_id)
        piece = stream.push(token_id) if mark is None else stream.flush()
        if self._header is not None:
            self._header, piece = self._header + piece, ""
        if mark is None:
            return piece
        if mark != MESSAGE:
            self._header = ""
            return piece
        final = (self._header or "").split()[:1] == ["final"]
        self._header = None
        return piece + self._turn(final)

    def _turn(self, final: bool) -> str:
        """The tag between what was said and what comes."""
        was, self._reasoning = self._reasoning, not final
        if was:
            return THOUGHT if final else "\n"
        return "" if final else THINK
