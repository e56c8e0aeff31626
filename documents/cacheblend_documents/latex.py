"""LaTeX and BibTeX as text: accents and symbols are letters, sections are headings, comments are left out.

Formulas, tables and other commands stay as they are written. The lines are those of the file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from cacheblend_documents.charsets import decoded_text
from cacheblend_documents.converted import Converted
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import decoded, marked_codec

_MARKS = {
    '"': "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", "~": "\u0303", "=": "\u0304", ".": "\u0307",
    "c": "\u0327", "v": "\u030c", "u": "\u0306", "H": "\u030b", "k": "\u0328", "r": "\u030a", "b": "\u0331", "d": "\u0323",
}  # fmt: skip
"""Accent -> combining character."""
_SYMBOLS = {
    "ss": "ß", "o": "ø", "O": "Ø", "aa": "å", "AA": "Å", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "l": "ł", "L": "Ł", "i": "\u0131", "j": "\u0237",
    "dh": "ð", "DH": "Ð", "th": "þ", "TH": "Þ", "dj": "đ", "DJ": "Đ", "ng": "ŋ", "NG": "Ŋ", "S": "§", "P": "¶", "pounds": "£", "euro": "€",
    "texteuro": "€", "textdegree": "°", "degree": "°", "textmu": "µ", "copyright": "©", "dots": "…", "ldots": "…",
    "LaTeX": "LaTeX", "TeX": "TeX",
}  # fmt: skip
_LEVELS = {"title": 1, "part": 1, "chapter": 1, "section": 2, "subsection": 3, "subsubsection": 4}
_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_ADDRESS = r"\\(?:url|href|path)\{[^{}]*\}"
_VERBATIM = re.compile(r"\\begin\{(verbatim|Verbatim|lstlisting|minted|alltt)\b")
_COMMENT = re.compile(rf"({_ADDRESS}|\\.)|%.*")
_BLANK = re.compile(rf"({_ADDRESS}|\\\\|\\~)|~|\\[,;: ]")
_SYMBOL = re.compile(rf"(?<!\\)\\({'|'.join(_SYMBOLS)})(?![A-Za-z])(?:\{{\}}|[ \t]+)?")
_ACCENT = re.compile(
    r"""(?<!\\)\\(?:(["'`^~=.])|([cvuHkr])(?=[ {])|([bd])(?=\{))[ ]*(?:\{([A-Za-z\u0131\u0237])\}|([A-Za-z\u0131\u0237]))"""
)
_LETTERS = re.compile(r"(\\[A-Za-z]+\*?(?:\[[^\[\]]*\])?(?:\{[^{}]*\})+|[\^_]\{[^{}]*\})|\{(\w+)\}")
_STYLED = re.compile(rf"\\(?:emph|mbox|underline|text(?:bf|it|rm|sc|sf|sl|tt|up|normal)?){_BRACED}")
_HEADING = re.compile(rf"^[ \t]*\\({'|'.join(_LEVELS)})\*?(?:\[[^\[\]]*\])?{_BRACED}")
_LABEL = re.compile(r"\\label\{[^{}]*\}")
_ESCAPED = re.compile(r"(\\\\)|\\([%#_$&])")
_CELLS = re.compile(r"(?<!\\)&")
_ENCODING = re.compile(rb"\\usepackage\s{0,9}\[([\w-]{1,40})\]\s{0,9}\{inputenc\}")
_ENCODINGS = {"ansinew": "cp1252", "applemac": "mac_roman", "latin9": "iso-8859-15"}


def from_latex(data: bytes) -> Converted:
    declared, omissions = _ENCODING.search(data), Omissions()
    if declared is not None and not marked_codec(data):
        name = declared[1].decode()
        data = decoded_text(data, _ENCODINGS.get(name, name), omissions).encode()
    text = "\n".join(_lines(decoded(data)))
    return Converted(text, "markdown", omissions=tuple(omissions))


def from_bibliography(data: bytes) -> Converted:
    return Converted("\n".join(map(_text, decoded(data).split("\n"))))


def _lines(source: str) -> Iterator[str]:
    """Yield the text of each line. Those of verbatim environments stay as they are."""
    verbatim = ""
    for line in source.split("\n"):
        if verbatim:
            verbatim = "" if f"\\end{{{verbatim}" in line else verbatim
            yield line
            continue
        if begin := _VERBATIM.search(line):
            verbatim = begin[1]
        text = _text(_LABEL.sub("", _COMMENT.sub(lambda found: found[1] or "", line)).rstrip())
        yield _HEADING.sub(lambda found: f"{'#' * _LEVELS[found[1]]} {found[2].strip()}", text, count=1)


def _text(line: str) -> str:
    """Return a line with letters for accents and symbols, and without the braces and fonts of words."""
    if "\\" in line:
        line = _SYMBOL.sub(lambda found: _SYMBOLS[found[1]], line)
        line = _ACCENT.sub(_accented, line)
    line = _LETTERS.sub(lambda found: found[1] or found[2], line)
    line = _STYLED.sub(r"\1", _STYLED.sub(r"\1", line))
    line = _BLANK.sub(lambda found: found[1] or " ", line).replace("---", "—")
    is_row = _CELLS.search(line) is not None  # of a table, where "\&" is not the end of a cell
    return _ESCAPED.sub(lambda found: found[0] if found[1] or (is_row and found[2] == "&") else found[2], line)


def _accented(found: re.Match[str]) -> str:
    mark, letter = _MARKS[found[1] or found[2] or found[3]], found[4] or found[5]
    return unicodedata.normalize("NFC", letter.replace("\u0131", "i").replace("\u0237", "j") + mark)
