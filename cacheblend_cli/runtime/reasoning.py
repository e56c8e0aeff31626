"""Reasoning: what a model says between think tags before its answer, told apart from it while it is said."""

from __future__ import annotations

from typing import Literal

from cacheblend_cli.model.text_stream import TextStream
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.template import THINK, THOUGHT
from cacheblend_cli.runtime.channels import FINAL, Channels
from cacheblend_cli.runtime.stops import StopStrings

CLOSING = f"\n{THOUGHT}\n\n"
"""What ends reasoning that has used its tokens up."""
CLOSING_ROOM = 24
"""Tokens that the tags and what stands around them take at most."""


class Reasoning:
    """Splits text at the think tags. It is reasoning from a tag that begins it, or from its beginning where the prompt ended
    with that tag; a tag further on is text. The blank lines behind the closing tag are nobody's."""

    def __init__(self, opened: bool) -> None:
        self._place: Literal["beginning", "reasoning", "between", "answer"] = "reasoning" if opened else "beginning"
        self._held = ""

    @property
    def open(self) -> bool:
        return self._place == "reasoning"

    @property
    def undecided(self) -> str:
        """What may be the beginning of an answer, or of the tag."""
        return self._held if self._place == "beginning" else ""

    @property
    def may_open(self) -> bool:
        return self._place == "beginning"

    @property
    def before_answer(self) -> bool:
        """Whether all that was said is reasoning and what surrounds it."""
        return self._place in ("reasoning", "between")

    def push(self, piece: str) -> tuple[str, str]:
        """What is certainly reasoning, and what is answer."""
        text, self._held, reasoning = self._held + piece, "", ""
        if self._place == "beginning":
            stripped = text.lstrip()
            if stripped.startswith(THINK):
                self._place, text = "reasoning", stripped.removeprefix(THINK)
            elif THINK.startswith(stripped):
                self._held = text
                return "", ""
            else:
                self._place = "answer"
        if self._place == "reasoning":
            reasoning, closed, text = text.partition(THOUGHT)
            if not closed:
                keep = max((n for n in range(1, len(THOUGHT)) if reasoning.endswith(THOUGHT[:n])), default=0)
                self._held = reasoning[len(reasoning) - keep :]
                return reasoning[: len(reasoning) - keep], ""
            self._place = "between"
        if self._place == "between":
            text = text.lstrip()
            self._place = "answer" if text else "between"
        return reasoning, text

    def flush(self) -> tuple[str, str]:
        """What is held, at the end."""
        held, self._held = self._held, ""
        return (held, "") if self.open else ("", held)


class Speech:
    """What ids say, in pieces that are certain: reasoning, and the answer up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], opened: bool) -> None:
        self.reasoning = Reasoning(opened)
        self._stream, self._stop = TextStream(tokenizer), StopStrings(stops)
        self._channels = Channels.of(tokenizer)
        tags = {tokenizer.token_id(tag): tag for tag in (THINK, THOUGHT)}
        self._silent_tags = {i: tag for i, tag in tags.items() if i is not None and tokenizer.is_silent(i)}

    def push(self, token_id: int) -> tuple[str, str]:
        """Reasoning and answer that the token makes certain."""
        tag = self._silent_tags.get(token_id)
        if self._channels is not None:
            piece = self._channels.push(token_id, self._stream)
        else:
            piece = self._stream.push(token_id) if tag is None else self._stream.flush() + tag
        reasoning, answer = self.reasoning.push(piece)
        return reasoning, self._stop.push(answer)

    @property
    def closing(self) -> str:
        """What is said for the model where its reasoning has used its tokens up."""
        return CLOSING if self._channels is None else FINAL

    @property
    def stopped(self) -> bool:
        """Whether the answer has a stop string, in what is not certain yet, too."""
        if self._stop.hit:
            return True
        return not self.reasoning.open and self._stop.is_in(self.reasoning.undecided + self._stream.held())

    def flush(self) -> tuple[str, str]:
        """The rest."""
        parts = [self.reasoning.push(self._stream.flush()), self.reasoning.flush()]
        answer = "".join(self._stop.push(answer) for _, answer in parts)
        return "".join(reasoning for reasoning, _ in parts), answer + self._stop.flush()
