"""Incremental split of generated text into reasoning (between the model's tags) and answer, which a stop string
ends."""

from __future__ import annotations

from typing import Literal

from cacheblend_cli.model.text_stream import TextStream
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.reasoning_tags import THINK, ReasoningTags
from cacheblend_cli.prompt.template import CHANNEL

START, MESSAGE, END = "<|start|>", "<|message|>", "<|end|>"
FINAL = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
"""Closes reasoning whose budget is used up, in gpt-oss's channels."""


class ReasoningParser:
    """Splits text at the reasoning tags. Reasoning starts at an opening tag at the beginning of the text, or at once if
    the prompt ended with that tag; a tag further on is text. Blank lines after the closing tag are dropped."""

    def __init__(self, opened: bool, tags: ReasoningTags = THINK) -> None:
        self._tags = tags
        self._place: Literal["beginning", "reasoning", "between", "answer"] = "reasoning" if opened else "beginning"
        self._held = ""

    @property
    def open(self) -> bool:
        return self._place == "reasoning"

    @property
    def undecided(self) -> str:
        """Text that may be the start of the answer or of the tag."""
        return self._held if self._place == "beginning" else ""

    @property
    def before_answer(self) -> bool:
        """Return whether the answer has not begun: all text so far is reasoning or its tags."""
        return self._place in ("reasoning", "between")

    def push(self, piece: str) -> tuple[str, str]:
        """Return the final (reasoning, answer) text."""
        text, self._held, reasoning = self._held + piece, "", ""
        if self._place == "beginning":
            stripped = text.lstrip()
            if stripped.startswith(self._tags.open):
                self._place, text = "reasoning", stripped.removeprefix(self._tags.open)
            elif self._tags.open.startswith(stripped):
                self._held = text
                return "", ""
            else:
                self._place = "answer"
        if self._place == "reasoning":
            close = self._tags.close
            reasoning, closed, text = text.partition(close)
            if not closed:
                at = _begins_at(close, reasoning)
                self._held = reasoning[at:]
                return reasoning[:at], ""
            self._place = "between"
        if self._place == "between":
            text = text.lstrip()
            self._place = "answer" if text else "between"
        return reasoning, text

    def flush(self) -> tuple[str, str]:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return (held, "") if self.open else ("", held)


class Channels:
    """Converts gpt-oss's channels to think tags: text of the channel `final` is the answer, text of others reasoning.

    Parses `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`, tokens that decoding skips. Text
    between one of them and `<|message|>` is a header, and is dropped. Text without any of them is the answer."""

    def __init__(self, marks: dict[int, str]) -> None:
        self._marks = marks
        self._header: str | None = None  # None: not in one
        self._reasoning = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Channels | None:
        """Return the channels of a tokenizer, None if it has none."""
        ids = {mark: tokenizer.token_id(mark) for mark in (START, CHANNEL, MESSAGE, END)}
        marks = {i: mark for mark, i in ids.items() if i is not None and tokenizer.is_silent(i)}
        return cls(marks) if {CHANNEL, MESSAGE} <= set(marks.values()) else None

    def push(self, token_id: int, stream: TextStream) -> str:
        """Return the text that is final with this token, with think tags in place of channels."""
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
        was, self._reasoning = self._reasoning, not final
        if was:
            return THINK.close if final else "\n"
        return "" if final else THINK.open


class StopStrings:
    """Ends an answer before the first stop string, which may span pieces of text; the beginning of a possible one is
    held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.hit = stops, "", False

    def push(self, piece: str) -> str:
        """Return the text that can be shown. After a hit, nothing."""
        if self.hit or not self._stops:
            return "" if self.hit else piece
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.hit = bool(ends)
        at = min(ends)[1] if ends else min(_begins_at(stop, text) for stop in self._stops)
        self._held = "" if self.hit else text[at:]
        return text[:at]

    def is_in(self, piece: str) -> bool:
        """Return whether pushing the piece would be a hit."""
        return any(stop in self._held + piece for stop in self._stops)

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _begins_at(wanted: str, text: str) -> int:
    """Return the index from which the end of the text is a beginning of `wanted`, the text's length without one."""
    at = text.find(wanted[0], max(0, len(text) - len(wanted) + 1))
    while at >= 0 and not wanted.startswith(text[at:]):
        at = text.find(wanted[0], at + 1)
    return len(text) if at < 0 else at


class Detokenizer:
    """Text of token ids, released once it is final: reasoning, and the answer up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], opened: bool, tags: ReasoningTags = THINK) -> None:
        self._channels = Channels.of(tokenizer)
        self._tags = THINK if self._channels is not None else tags
        self.reasoning = ReasoningParser(opened, self._tags)
        self._stream, self._stop = TextStream(tokenizer), StopStrings(stops)
        ids = {tokenizer.token_id(tag): tag for tag in (self._tags.open, self._tags.close)}
        self._silent_tags = {i: tag for i, tag in ids.items() if i is not None and tokenizer.is_silent(i)}

    def push(self, token_id: int) -> tuple[str, str]:
        """Return the reasoning and the answer text that are final with this token."""
        tag = self._silent_tags.get(token_id)
        if self._channels is not None:
            piece = self._channels.push(token_id, self._stream)
        else:
            piece = self._stream.push(token_id) if tag is None else self._stream.flush() + tag
        reasoning, answer = self.reasoning.push(piece)
        return reasoning, self._stop.push(answer)

    @property
    def closing(self) -> str:
        """Text that closes the reasoning when its token budget is used up."""
        return f"\n{self._tags.close}\n\n" if self._channels is None else FINAL

    @property
    def stopped(self) -> bool:
        """Return whether the answer contains a stop string, including text that is held back."""
        if self._stop.hit:
            return True
        return not self.reasoning.open and self._stop.is_in(self.reasoning.undecided + self._stream.held())

    def flush(self) -> tuple[str, str]:
        """Return the reasoning and the answer text held back, at the end."""
        parts = [self.reasoning.push(self._stream.flush()), self.reasoning.flush()]
        answer = "".join(self._stop.push(answer) for _, answer in parts)
        return "".join(reasoning for reasoning, _ in parts), answer + self._stop.flush()
