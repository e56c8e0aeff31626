"""A conversation on the command line: what was said, and the commands that look at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_cli.cli.answers import layer_lines
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import UsageError
from cacheblend_cli.text_files import write_text

COMMANDS = {
    "/sources": "the chunks of the last answer, and how their KV came to be",
    "/why": "what the last answer computed, chunk by chunk and layer by layer",
    "/docs": "the documents that are searched",
    "/save": "write the conversation to a file: /save FILE.md or FILE.json",
    "/forget": "begin a new conversation",
    "/help": "this",
    "/quit": "end",
}
_BAR = 20  # columns


@dataclass
class Conversation:
    """named: ids of the chunks that it is over, None to search for each question. turns: question and answer of each. last: the
    last answer, None before it."""

    named: tuple[str, ...] | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    last: Any = None

    def said(self, question: str, text: str, answer: Any) -> None:
        self.turns.append((question, text))
        self.last = answer

    @property
    def history(self) -> list[str]:
        """What was said in turn, as a question goes behind it."""
        return [text for turn in self.turns for text in turn]


def do_command(line: str, talk: Conversation, documents: Callable[[], list[str]], output: Output) -> None:
    """Do what a line that begins with a slash says. Raises UsageError."""
    name, _, argument = line.partition(" ")
    match name:
        case "/help":
            for command, told in COMMANDS.items():
                output.text(f"{command:<9} {told}")
        case "/docs":
            for source in documents():
                output.line(source)
        case "/forget":
            talk.turns, talk.last = [], None
            output.note("what was said is forgotten")
        case "/save":
            _save(argument.strip(), talk, output)
        case "/sources" | "/why":
            if talk.last is None:
                raise UsageError("nothing was asked yet", "ask something first")
            (_sources if name == "/sources" else _why)(talk.last, output)
        case _:
            raise UsageError(f"unknown command {name}", f"known: {', '.join(COMMANDS)}")


def _sources(answer: Any, output: Output) -> None:
    rows = [(c.id[:12], c.tokens, c.status, c.source) for c in answer.chunks]
    output.table(("chunk", "tokens", "status", "source"), rows, right=(1,), ends=(3,))


def _why(answer: Any, output: Output) -> None:
    """A bar a chunk, as long as its share that was computed."""
    for c in answer.chunks:
        share = c.recomputed / c.tokens if c.tokens else 0.0
        filled = round(share * _BAR) or int(c.recomputed > 0)
        bar = "#" * filled + "." * (_BAR - filled)
        output.line(
            f"{c.id[:12]}  {bar}  {c.recomputed:>5} of {c.tokens:>5} tokens computed, {c.status:<8}  {c.source}"
        )
    for line in layer_lines(answer):
        output.line(line)


def _save(name: str, talk: Conversation, output: Output) -> None:
    if not name:
        raise UsageError("/save needs a file", "/save talk.md, or talk.json")
    path = Path(name).expanduser()
    if path.suffix == ".json":
        text = json.dumps([{"question": q, "answer": a} for q, a in talk.turns], ensure_ascii=False, indent=1) + "\n"
    else:
        text = "".join(f"## {q}\n\n{a}\n\n" for q, a in talk.turns)
    write_text(path, text, "name another file", new=True)
    output.note(f"{len(talk.turns)} turns are in {path}")
