"""Wrap the prose of Markdown at 120 characters: `python -m tools.wrap FILE...`. Tables, code and headings stay."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH = 120
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_FIXED = ("|", "#", "<!--", "```", "![")
"""Beginnings of lines that stay as they are."""
_NO_BREAK = "\ue000"  # a private character in the place of a space inside a code span


def wrapped(text: str) -> str:
    """Return the text with its paragraphs and list items wrapped, if one of their lines is too long."""
    return "\n".join(line for block in _blocks(text.split("\n")) for line in _fitted(block))


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield paragraphs, list items, code blocks and single other lines."""
    block: list[str] = []
    fenced = indented = False
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        # an indented block after an empty line is code, up to the next line that is not indented
        indented = (line.startswith("    ") and (indented or not block)) or (indented and not line)
        is_prose = line.strip() and not (fenced or indented or line.lstrip().startswith(_FIXED))
        if block and (not is_prose or _ITEM.match(line)):
            yield block
            block = []
        if is_prose:
            block.append(line)
        else:
            yield [line]
    if block:
        yield block


def _fitted(block: list[str]) -> list[str]:
    """Return the lines of a block, none too long and no code span broken."""
    is_code = len(block) == 1 and block[0].startswith("    ") and not _ITEM.match(block[0])
    fits = all(len(line) <= WIDTH and line.count("`") % 2 == 0 for line in block)
    if is_code or fits or block[0].lstrip().startswith(_FIXED):
        return block
    item = _ITEM.match(block[0])
    first = item[0] if item else " " * (len(block[0]) - len(block[0].lstrip()))
    words = " ".join([block[0][len(first) :], *map(str.strip, block[1:])])
    whole = re.sub("`[^`]+`", lambda span: span[0].replace(" ", _NO_BREAK), words)
    lines = textwrap.wrap(
        whole,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(wrapped(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
