"""Interface of converters: bytes of a file to text, or the reason to skip the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cacheblend_cli.corpus.layout import Converted, Kind, Layout, Mark
from cacheblend_cli.extras import install_hint

Converter = Callable[[bytes], Converted]
"""Converts the bytes of a file. Raises NoDocument for a file without text, or one that cannot be read."""


class NoDocument(Exception):
    """A file that is skipped. reason: in words. group: name to count such files under, by default the reason. unread: it could
    not be read, so it may be a document. by_rule: files of its kind are not opened."""

    def __init__(self, reason: str, group: str = "", *, unread: bool = False, by_rule: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.group, self.unread, self.by_rule = reason, group or reason, unread or by_rule, by_rule


def decoded(data: bytes) -> str:
    """Decode UTF-8, with "\\n" as line end. Raises NoDocument for other encodings and binary data."""
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
    parts: Iterable[tuple[str, Mark]], kind: Kind = "text", *, apart: bool = False, title: str = "", note: str = ""
) -> Converted:
    """Join parts with an empty line between, and set the marks' starts. Parts without text are dropped."""
    texts, marks, start = list[str](), list[Mark](), 0
    for text, mark in parts:
        if text := text.strip("\n"):
            texts.append(text + "\n\n")
            marks.append(Mark(start, mark.part, mark.line))
            start += len(texts[-1])
    whole = "".join(texts)
    return Converted(whole, Layout(kind, numbered=False, marks=tuple(marks), apart=apart, title=title, note=note))


@contextmanager
def parsing(package: str, what: str) -> Iterator[None]:
    """Turn a missing library and any error of its parser into NoDocument."""
    try:
        yield
    except ImportError:
        missing = f"needs {package}: {install_hint('documents')}"
        raise NoDocument(missing, "needing the documents extra", unread=True) from None
    except NoDocument:
        raise
    except Exception as error:
        raise NoDocument(f"not {what}: {error}"[:120], "damaged or locked") from error
