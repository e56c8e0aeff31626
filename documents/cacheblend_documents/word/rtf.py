"""Rich Text Format: paragraphs and tables, with list numbers, notes, comments, headers and footers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_documents.charsets import codec_of
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.inline_marks import (
    LINK,
    LOWERED,
    NOT_STRUCK,
    RAISED,
    STRUCK,
    comment_mark,
    end_of_link,
    shown,
)
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import RTF, without_data_uris
from cacheblend_documents.word.fields import hyperlink
from cacheblend_documents.word.rtf_text import BODY, RtfText

_TOKEN = re.compile(
    rb"\\([A-Za-z]{1,32})(-?\d{1,10})? ?|\\'([0-9A-Fa-f]{2})|\\([^A-Za-z])|([{}])|([^\\{}\r\n]+)|[\r\n]+|\\", re.DOTALL
)
"""Control word and its number, hexadecimal byte, control symbol, brace, text; line ends have no meaning."""
_CODE_PAGES = {
    77: "mac_roman", 78: "cp932", 79: "cp950", 80: "cp949", 81: "mac_arabic", 83: "mac_greek", 84: "mac_cyrillic", 85: "cp936",
    86: "mac_romanian", 88: "cp874", 89: "mac_latin2", 128: "cp932", 129: "cp949", 130: "johab", 134: "cp936", 136: "cp950", 161: "cp1253",
    162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257", 204: "cp1251", 222: "cp874", 238: "cp1250", 254: "cp437",
    255: "cp850", 0: "cp1252",
}  # fmt: skip
"""Character set of a font -> encoding. Others have that of the document."""
_SYMBOLS = 2  # character set of pictograms
_CHARACTERS = {
    "tab": "\t", "emdash": "\u2014", "endash": "\u2013", "emspace": " ", "enspace": " ", "qmspace": " ", "bullet": "\u2022",
    "lquote": "\u2018", "rquote": "\u2019", "ldblquote": "\u201c", "rdblquote": "\u201d", "line": "\n", "lbr": "\n", "softline": "\n",
    "~": " ", "_": "-", "{": "{", "}": "}", "\\": "\\",
}  # fmt: skip
_CHARACTER_SETS = {"mac": "mac_roman", "pc": "cp437", "pca": "cp850"}
"""Word for the character set of the document -> encoding."""
_PROPERTIES: dict[str, Callable[[int | None], dict[str, Any]]] = {
    "uc": lambda value: {"fallback": min(max(value or 0, 0), 9)},
    **dict.fromkeys(("v", "deleted"), lambda value: {"is_hidden": value != 0}),
    "super": lambda value: {"is_raised": value != 0},
    **dict.fromkeys(("nosupersub", "sub"), lambda value: {"is_raised": False}),
    "pard": lambda value: {"in_table": False, "outline": BODY},
    **dict.fromkeys(("strike", "striked"), lambda value: {"is_struck": value != 0}),
    "intbl": lambda value: {"in_table": value != 0},
    "outlinelevel": lambda value: {"outline": value or 0},
}
"""Word -> properties of the text after it, by the number after the word."""
_ENDS = frozenset(("par", "sect", "page", "column", "\n", "\r"))
_SKIPPED = frozenset(
    "fonttbl colortbl stylesheet info pict nonshppict objdata objclass objname xe tc txe rxe filetbl revtbl sn sv private template "
    "shprslt datafield falt panose leveltext levelnumbers listtable listoverridetable ftnsep ftnsepc ftncn aftnsep aftnsepc aftncn atnid "
    "atnref nonesttables atntime atnicn atndate atnparent".split()
)
"""Destinations that are not text, besides unknown ones after `\\*`."""
_TRANSPARENT = frozenset(("shpinst", "shpgrp", "result", "listtext", "pntext", "nesttableprops"))
"""Destinations after `\\*` that have text."""
_MARKED = {
    "footnote": "Footnote: ", "annotation": "Comment: ", "shptxt": "", "dptxbxtext": "",
    **dict.fromkeys(("header", "headerl", "headerr", "headerf"), "Header: "),
    **dict.fromkeys(("footer", "footerl", "footerr", "footerf"), "Footer: "),
}  # fmt: skip
"""Destination whose text follows the paragraph -> mark before it."""


def from_rtf(data: bytes) -> Converted:
    if not data.startswith(RTF):
        raise NotConverted("not RTF", "damaged or locked")
    return _Reader().read(data)


@dataclass(frozen=True)
class _State:
    """Properties of a group, which end with it. text: None in skipped destinations."""

    text: RtfText | None
    encoding: str
    fallback: int = 1  # characters to skip after a Unicode character
    is_hidden: bool = False
    in_table: bool = False
    is_raised: bool = False
    is_struck: bool = False
    link: str = ""  # target of the field
    outline: int = BODY
    destination: str = ""  # the one that this group began

    @property
    def shown(self) -> RtfText | None:
        return None if self.is_hidden else self.text


class _Reader:
    def __init__(self) -> None:
        self._main, self._title, self._author = RtfText(), RtfText(), RtfText()
        self._omissions = Omissions()
        self._stack = list[_State]()
        self._state = _State(None, "cp1252")
        self._ansi = "cp1252"
        self._fonts = dict[int, str]()  # font -> encoding; "" for pictograms
        self._font = self._default = 0
        self._bytes = bytearray()  # not decoded yet
        self._to_skip = 0  # characters after a Unicode character
        self._is_optional = False  # after "\*"
        self._kinds = list[str]()  # cells of the row: "v" or "m" if merged with the one above or before
        self._merged = ""  # kind of the next cell
        self._above = list[str]()  # cells of the row above
        self._said = set[str]()  # headers and footers

    def read(self, data: bytes) -> Converted:
        place, is_open = 0, True
        while is_open and (found := _TOKEN.match(data, place)):
            word, argument, byte, symbol, brace, text = found.groups()
            place = found.end()
            if byte or text:
                self._add(bytes.fromhex(byte.decode()) if byte else text)
            elif brace == b"{":
                self._flush()
                self._stack.append(self._state)
                if self._state.destination:
                    self._state = replace(self._state, destination="")
            elif brace == b"}":
                is_open = self._close()
            elif word or symbol:
                name = (word or symbol).decode("latin-1")
                value = int(argument) if argument else None
                if name == "bin":
                    place += max(value or 0, 0)
                else:
                    self._control(name, value, is_word=bool(word))
        return self._converted(is_open)

    def _converted(self, is_open: bool) -> Converted:
        if is_open:
            self._omissions.say("the end of the file is missing")
        self._flush()
        self._main.end_row()
        self._main.end_paragraph()
        title = " ".join(shown("".join(self._title.pieces)).split())
        text = "".join(self._main.lines).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text, omissions = without_data_uris(text), tuple(self._omissions)
        return Converted(text, "markdown", keeps_lines=False, title=title, omissions=omissions)

    def _add(self, data: bytes) -> None:
        skipped = min(self._to_skip, len(data))
        self._to_skip -= skipped
        if self._state.shown is not None:
            self._bytes += data[skipped:]

    def _flush(self) -> None:
        """Decode the bytes so far. They end with any change of the state, so that two-byte characters stay whole."""
        data, encoding = bytes(self._bytes), self._state.encoding
        self._bytes.clear()
        self._to_skip = 0
        if not data:
            return
        if not encoding:
            self._write("\u2022" if data.strip() == b"\xb7" else "")
            if data.strip() not in (b"", b"\xb7"):
                self._omissions.add(
                    "character of a symbol font", count=len(data.strip()), plural="characters of symbol fonts"
                )
            return
        text = data.decode(encoding, "replace")
        if "\ufffd" in text:
            self._omissions.add("unreadable character", count=text.count("\ufffd"))
        self._write(text)

    def _write(self, characters: str) -> None:
        text = self._state.shown
        if text is None or not characters:
            return
        if self._state.is_raised:
            characters = f"{RAISED}{characters}{LOWERED}"
        text.pieces.append(f"{STRUCK}{characters}{NOT_STRUCK}" if self._state.is_struck else characters)

    def _close(self) -> bool:
        """End a group; return whether the document goes on."""
        self._flush()
        ended = self._state
        self._state = self._stack.pop() if self._stack else ended
        if ended.destination == "fldinst" and ended.text is not None:
            self._state = replace(self._state, link=hyperlink("".join(ended.text.pieces)))
        elif ended.destination == "fldrslt" and ended.text is not None:
            ended.text.pieces.append(end_of_link(ended.link))
        elif ended.destination in _MARKED and ended.text is not None:
            ended.text.end_row()
            ended.text.end_paragraph()
            self._add_note(ended.text)
        return bool(self._stack)

    def _add_note(self, note: RtfText) -> None:
        mark = note.mark
        if mark == "Comment: ":
            mark, self._author = comment_mark("".join(self._author.pieces)), RtfText()
        text = mark + "".join(note.lines).strip()
        if note.lines and text not in self._said:
            around = self._state.text or self._main
            if around.is_empty and mark == "Header: ":
                around.add(text, is_row=False)
            else:
                around.after.append(text)
            if mark in ("Header: ", "Footer: "):
                self._said.add(text)

    def _control(self, name: str, value: int | None, is_word: bool) -> None:
        if name == "u" and is_word:
            if self._bytes:
                self._flush()
            self._unicode((value or 0) % 0x10000)
            return
        self._flush()
        if name == "*":
            self._is_optional = True
            return
        is_optional, self._is_optional = self._is_optional, False
        if is_word and self._begins(name, is_optional):
            return
        if name in _CHARACTERS:
            self._write(_CHARACTERS[name])
        elif name in _ENDS:
            self._end_paragraph()
        elif name in ("cell", "nestcell"):
            self._end_cell()
        elif name in ("row", "nestrow") and self._state.text is not None:
            self._above = self._state.text.end_row(self._kinds, self._above)
        else:
            self._format(name, value)

    def _begins(self, name: str, is_optional: bool) -> bool:
        """Change the destination of the group if the word names one."""
        text, state = self._state.text, self._state
        if name == "rtf" and len(self._stack) == 1:
            text = self._main
        elif name in ("title", "atnauthor"):
            self._author = RtfText() if name == "atnauthor" else self._author
            text = self._title if name == "title" else self._author
        elif name == "fldinst":
            text = RtfText() if text is not None else None
        elif name == "fldrslt" and text is not None:
            text.pieces.append(LINK)
        elif name in _MARKED and text is not None:
            text = RtfText(_MARKED[name])
        elif name in _SKIPPED or (is_optional and name not in _TRANSPARENT):
            text = None
            if name == "moMath" and state.text is not None:
                self._omissions.add("equation")
        elif name == "object" and text is not None:
            self._omissions.add("embedded object")
            return True
        else:
            return False
        self._state = replace(state, text=text, destination=name)
        return True

    def _unicode(self, code: int) -> None:
        self._to_skip = self._state.fallback
        if code & 0xFF00 == 0xF000:  # of a symbol font
            self._write("\u2022" if code == 0xF0B7 else "")
            if code != 0xF0B7:
                self._omissions.add("character of a symbol font", plural="characters of symbol fonts")
        else:
            self._write(chr(code))

    def _end_paragraph(self) -> None:
        text = self._state.text
        if text is not None and self._state.in_table:
            text.pieces.append("\n")
        elif text is not None:
            text.end_row()
            text.end_paragraph(self._state.outline)

    def _end_cell(self) -> None:
        text = self._state.text
        if text is not None:
            text.cells.append(" ".join(shown("".join(text.pieces)).split()))
            text.pieces.clear()

    def _format(self, name: str, value: int | None) -> None:
        """Change the properties that matter for the text."""
        if name in _PROPERTIES:
            self._state = replace(self._state, **_PROPERTIES[name](value))
        elif name == "fcharset":
            known = self._ansi if value == 1 else _CODE_PAGES.get(value or 0, self._ansi)
            self._fonts[self._font] = "" if value == _SYMBOLS else known
        elif name == "cpg" and value:
            self._fonts[self._font] = self._code_page(value)
        elif name == "deff":
            self._default = value or 0
        elif name == "trowd":
            self._merged, self._kinds = "", []
        elif name in ("clvmrg", "clmrg"):
            self._merged = name[2]
        elif name == "cellx":
            self._kinds.append(self._merged)
            self._merged = ""
        else:
            self._set_encoding(name, value)

    def _set_encoding(self, name: str, value: int | None) -> None:
        """Change the encoding of the document or of the text that follows."""
        if name == "f":
            self._font = value or 0
            encoding = self._fonts.get(self._font, self._ansi)
        elif name == "plain":
            self._state = replace(self._state, is_hidden=False, is_raised=False, is_struck=False)
            encoding = self._fonts.get(self._default, self._ansi)
        elif name in _CHARACTER_SETS or (name == "ansicpg" and value):
            encoding = self._ansi = _CHARACTER_SETS.get(name) or self._code_page(value or 0)
        else:
            return
        self._state = replace(self._state, encoding=encoding)

    def _code_page(self, number: int) -> str:
        """Return the encoding of a code page, that of the document if it is unknown."""
        return codec_of(f"cp{number}") or self._ansi
