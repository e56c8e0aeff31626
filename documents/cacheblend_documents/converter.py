"""Interface of converters: from the bytes of a file to text, or to the reason to skip the file. Converters of text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cacheblend_documents.layout import Converted, Kind, Mark, TextLayout, shortened

INSTALL = "pip install pypdfium2 python-calamine defusedxml"
"""Command that installs the libraries that some converters need."""
SCANNED = "scanned PDFs"
"""Group of PDFs that have text only in images."""
Converter = Callable[[bytes], Converted]
"""Converts the bytes of a file. Raises NoDocument if the file has no text or cannot be read."""


class NoDocument(Exception):
    """Raised for a file to skip."""

    def __init__(self, reason: str, group: str = "", *, unread: bool = False, by_rule: bool = False) -> None:
        """reason: shown to the user.
        group: label to count similar files under; by default the reason.
        unread: the file could not be read, so it may be a document.
        by_rule: a rule says not to open files like this; implies unread.
        """
        super().__init__(reason)
        self.reason, self.group, self.unread, self.by_rule = reason, group or reason, unread or by_rule, by_rule


_HALF = re.compile("[\ud800-\udfff]")
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""Byte order mark -> codec. UTF-32 comes before UTF-16, because its little-endian mark begins with that of UTF-16."""


_DATA_URI = re.compile(r"""data:([\w.+-]{1,60}\\?/[\w.+-]{1,60})((?:;[\w.+=-]{1,60}){0,6}),((?:[^\s"'()<>\\]|\\/)+)""")
"""Media type, parameters and data; JSON may escape the slashes."""
_SHORTEST_DATA = 100


def without_data_uris(text: str) -> str:
    """Shorten `data:` URIs of pictures and other base64 data to their media type: `data:image/png`."""
    return _DATA_URI.sub(_shortened_uri, text) if "data:" in text else text


def _shortened_uri(found: re.Match[str]) -> str:
    is_data = found[2].endswith(";base64") or found[1].startswith("image")
    return f"data:{found[1]}" if is_data and len(found[3]) >= _SHORTEST_DATA else found[0]


_CONTROLS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)|[!-/]*[0-~])|[^\n]\x08")
_ISO_2022 = "\x1b$"  # begins a text of Chinese, Japanese or Korean that is written in ASCII
_ARMOUR = re.compile("-----BEGIN (?!PGP SIGNED)[A-Z0-9 ]+-----")  # of base64


def without_controls(text: str) -> str:
    """Remove the control sequences of terminals, such as colours (ECMA-48), and letters that others are struck over."""
    return _CONTROLS.sub("", text) if "\x1b" in text or "\b" in text else text


RTF = b"{\\rtf"
"""Start of an RTF file."""
COMPOUND = bytes.fromhex("d0cf11e0a1b11ae1")
"""Start of old Office files, and of new ones with a password."""
OLD_OFFICE = "in an old Office format: save it as .docx, .xlsx or .pptx"


def marked_codec(data: bytes) -> str:
    """Return the codec that the byte order mark names, "" without one. The codec drops the mark."""
    return next((codec for mark, codec in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "")


def decoded(data: bytes) -> str:
    """Decode UTF-8, or the encoding of the byte order mark, convert line ends to "\\n" and remove control sequences.

    Raises NoDocument for binary data and other encodings. We do not guess: a wrong guess would be stored and quoted as
    the document's text.
    """
    if data.startswith(RTF):
        raise NoDocument("an RTF file: rename it to .rtf", "RTF files with another name")
    if data.startswith(COMPOUND):
        raise NoDocument(OLD_OFFICE, "damaged or locked")
    codec = marked_codec(data) or "utf-8"
    charset = codec.removesuffix("-sig").upper()
    if charset == "UTF-8" and b"\0" in data:
        raise NoDocument("binary")
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        hint = "; convert it: iconv -f cp1252 -t utf-8 FILE" if charset == "UTF-8" else ""
        raise NoDocument(f"invalid {charset} at byte {error.start}{hint}", "not UTF-8") from error
    if "\0" in text:
        raise NoDocument("binary")
    if _ISO_2022 in text and text.isascii():
        raise NoDocument("not UTF-8 but ISO 2022; convert it: iconv -f iso-2022-jp -t utf-8 FILE", "not UTF-8")
    if _ARMOUR.match(text):
        raise NoDocument("a key, certificate or encrypted message", "keys and encrypted messages")
    return without_data_uris(without_controls(text).replace("\r\n", "\n").replace("\r", "\n"))


def comment_mark(author: str, kind: str = "Comment") -> str:
    """Return the mark before the text of a comment: "Comment by Mara: "."""
    name = shortened(" ".join(author.split()))
    return f"{kind} by {name}: " if name else f"{kind}: "


def joined(
    parts: Iterable[tuple[str, Mark]],
    kind: Kind = "text",
    *,
    apart: bool = False,
    title: str = "",
    names: frozenset[str] | None = None,
    omissions: Iterable[str] = (),
) -> Converted:
    """Join parts with an empty line in between, and set the starts of their marks. Parts without text are dropped.

    omissions: read after the parts, so a generator of parts can add to them.
    """
    texts, marks, start = list[str](), list[Mark](), 0
    for text, mark in parts:
        if text := text.strip("\n"):
            texts.append(text + "\n\n")
            marks.append(Mark(start, mark.part, mark.line))
            start += len(texts[-1])
    whole = "".join(texts)
    layout = TextLayout(
        kind, numbered=False, marks=tuple(marks), apart=apart, title=title, names=names, omissions=tuple(omissions)
    )
    return Converted(whole, layout)


def encodable(converted: Converted) -> Converted:
    """Replace lone surrogates, which can occur in JSON but not in UTF-8."""
    layout = converted.layout
    marks = tuple(replace(mark, part=_HALF.sub("\ufffd", mark.part)) for mark in layout.marks)
    title, omissions = _HALF.sub("\ufffd", layout.title), tuple(_HALF.sub("\ufffd", o) for o in layout.omissions)
    return Converted(
        _HALF.sub("\ufffd", converted.text), replace(layout, marks=marks, title=title, omissions=omissions)
    )


@contextmanager
def parsing(package: str, what: str) -> Iterator[None]:
    """Convert a missing library, or any error of its parser, to NoDocument. Messages of parsers are not for users."""
    try:
        yield
    except ImportError:
        missing = f"needs {package}: {INSTALL}"
        raise NoDocument(missing, "needing the documents extra", unread=True) from None
    except (NoDocument, MemoryError, RecursionError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("defusedxml"):
            raise NoDocument(f"not {what}: its XML has entities or refers to files", "damaged or locked") from error
        raise NoDocument(f"not {what}, or damaged", "damaged or locked") from error


CODE_SUFFIXES = (
    ".py .pyi .pyx .js .jsx .mjs .cjs .ts .tsx .vue .svelte .java .kt .kts .scala .groovy .go .rs .c .h .cc .cpp .cxx .hh .hpp .hxx "
    ".cu .cuh .m .mm .cs .fs .vb .swift .rb .php .pl .pm .lua .r .jl .dart .ex .exs .erl .hrl .hs .ml .mli .clj .cljs .lisp .el .scm "
    ".nim .zig .d .pas .f90 .asm .s .sh .bash .zsh .fish .ps1 .bat .sql .graphql .proto .thrift .tf .nix .cmake .mk .gradle .css "
    ".scss .less .yaml .yml .toml .ini .cfg .conf"
)


def from_plain(data: bytes) -> Converted:
    return Converted(decoded(data))


def from_markdown(data: bytes) -> Converted:
    return Converted(decoded(data), TextLayout("markdown"))


def from_rst(data: bytes) -> Converted:
    return Converted(decoded(data), TextLayout("rst"))


def from_code(data: bytes) -> Converted:
    return Converted(decoded(data), TextLayout("code"))
