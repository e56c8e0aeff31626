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
                keep = max((n for n in range(1, len(close)) if reasoning.endswith(close[:n])), default=0)
                self._held = reasoning[len(reasoning) - keep :]
                return reasoning[: len(reasoning) - keep], ""
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
    held back. Each character is compared once with each stop string (Knuth-Morris-Pratt)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.hit = stops, "", False
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that end the text so far

    def push(self, piece: str) -> str:
        """Return the text that can be shown. After a hit, nothing."""
        if self.hit:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        end, length, self._matched = self._search(piece)
        if length:
            shown = text[: len(self._held) + end - length]
            self.hit, self._held = True, ""
            return shown
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def is_in(self, piece: str) -> bool:
        """Return whether pushing the piece would be a hit."""
        return bool(self._search(piece)[1])

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return "" if self.hit else held

    def _search(self, piece: str) -> tuple[int, int, list[int]]:
        """Return where in the piece the first stop string ends, its length (0 = none), and the match lengths after the
        piece."""
        matched = list(self._matched)
        for at, char in enumerate(piece):
            for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
                n = matched[i]
                while n and stop[n] != char:
                    n = borders[n - 1]
                matched[i] = n + (stop[n] == char)
            hits = [n for n, stop in zip(matched, self._stops, strict=True) if n == len(stop)]
            if hits:
                return at + 1, max(hits), matched
        return 0, 0, matched


def _borders(text: str) -> list[int]:
    """Length of the longest proper prefix of each text[: i + 1] that is also its suffix."""
    borders = [0] * len(text)
    n = 0
    for i in range(1, len(text)):
        while n and text[i] != text[n]:
            n = borders[n - 1]
        n += text[i] == text[n]
        borders[i] = n
    return borders


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
