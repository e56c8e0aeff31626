"""What a converter is: bytes of a file to its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from cacheblend_cli.corpus.layout import Converted, Kind, Layout, Mark
from cacheblend_cli.corpus.no_document import NoDocument


class Converter(Protocol):
    """A kind of file. suffixes: of its names, in lower case."""

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def convert(self, data: bytes) -> Converted:
        """Raises NoDocument for what has no text, or cannot be read."""


def decoded(data: bytes) -> str:
    """UTF-8 with "\\n" line ends. Raises NoDocument for other encodings and binary data."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise NoDocument("UTF-16, not UTF-8", "not UTF-8")
    if b"\0" in data:
        raise NoDocument("binary")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NoDocument(f"invalid UTF-8 at byte {error.start}", "not UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def joined(
    parts: Iterable[tuple[str, Mark]], kind: Kind = "text", *, apart: bool = False, title: str = ""
) -> Converted:
    """A text of parts, an empty line between; the marks' starts are set here. Parts without text are left out."""
    texts, marks, start = list[str](), list[Mark](), 0
    for text, mark in parts:
        if text := text.strip("\n"):
            texts.append(text + "\n\n")
            marks.append(Mark(start, mark.part, mark.line))
            start += len(texts[-1])
    whole = "".join(texts)
    return Converted(whole, Layout(kind, numbered=False, marks=tuple(marks), apart=apart, title=title))


@contextmanager
def parsing(package: str, what: str) -> Iterator[None]:
    """While a library reads a file: that it is not installed, and whatever its parser trips over, is a NoDocument."""
    try:
        yield
    except ImportError:
        told = f"needs {package}: pip install 'cacheblend[documents]'"
        raise NoDocument(told, "needing cacheblend[documents]", unread=True) from None
    except NoDocument:
        raise
    except Exception as error:
        raise NoDocument(f"not {what}: {error}"[:120], "damaged or locked") from error
