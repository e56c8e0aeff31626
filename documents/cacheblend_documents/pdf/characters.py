"""Characters of a PDF page and their boxes, without those that a font does not identify.

A font maps its codes to characters, if the program that wrote the file has put such a table in. Without one, PDFium
takes the codes themselves for characters, which is right for some fonts and garbage for others. Such text is kept if it
reads like words. Private, unassigned and control characters are left out.
"""

from __future__ import annotations

import ctypes
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from pypdfium2 import PdfPage, raw

from cacheblend_documents.pdf.lines import LINE_ENDS, Box, has_right_to_left, turned
from cacheblend_documents.pdf.raised import Glyphs
from cacheblend_documents.pdf.right_to_left import in_reading_order
from cacheblend_documents.symbols import BULLETS

_UNKNOWN = frozenset(("Cc", "Cn", "Co"))  # categories: control, unassigned, private
_UNKNOWN_SHARE = 0.02  # unknown characters of a text that reads like words
_VOWELS = frozenset("aeiouy")
_VOWELS_SHARE = 0.2, 0.65  # of the letters of words
_LETTERS_SHARE = 0.6  # letters and digits of the characters of words
_SCRIPT_SHARE = 0.8  # characters of one script
_SCRIPTS = (
    frozenset(range(0x370, 0x400)),  # Greek
    frozenset(range(0x400, 0x530)),  # Cyrillic
    frozenset((*range(0x3000, 0x3100), *range(0x4E00, 0xA000), *range(0xAC00, 0xD7A4), *range(0xFF00, 0xFFF0))),  # CJK
)


@dataclass(frozen=True, slots=True)
class PageCharacters:
    """Characters of a page and their boxes."""

    text: str
    boxes: Sequence[Box]
    num_unknown: int  # characters left out
    num_sloping: int = 0  # letters on sloping lines, which may lack blanks


def page_characters(page: PdfPage) -> PageCharacters:
    """Return the characters of a page in the order of reading within lines, with superscripts as in "10^6"."""
    text_page = page.get_textpage()
    count, handle = text_page.count_chars(), text_page.raw
    places = (raw.FS_RECTF * max(count, 1))()
    for index in range(count):
        raw.FPDFText_GetLooseCharBox(handle, index, places[index])
    characters = "".join([chr(raw.FPDFText_GetUnicode(handle, n)) for n in range(count)]).translate(BULLETS)
    unmapped = [raw.FPDFText_HasUnicodeMapError(handle, n) == 1 for n in range(count)]
    pens = list(_pens(handle, count))
    text_page.close()
    numbers = array("f", bytes(places))[: 4 * count]
    boxes: list[Box] = list(zip(numbers[::4], numbers[3::4], numbers[2::4], numbers[1::4], strict=True))
    boxes, pens = turned(boxes, page.get_rotation()), turned(pens, page.get_rotation())
    garbage = any(unmapped) and not _reads_like_words("".join(compress(characters, unmapped)))
    known = [not _is_unknown(c) and not (garbage and bad) for c, bad in zip(characters, unmapped, strict=True)]
    text = "".join(compress(characters, known))
    glyphs = Glyphs(text, list(compress(boxes, known)), list(compress(pens, known))).with_superscripts()
    if has_right_to_left(text):
        text, boxes, num_sloping = in_reading_order(glyphs.text, glyphs.boxes, glyphs.pens)
        return PageCharacters(text, boxes, known.count(False), num_sloping)
    return PageCharacters(glyphs.text, glyphs.boxes, known.count(False))


def _pens(text_page: Any, count: int) -> Iterator[Box]:
    """Yield the place of the pen before each character is drawn, as a box without a size."""
    x, y = ctypes.c_double(), ctypes.c_double()
    for index in range(count):
        raw.FPDFText_GetCharOrigin(text_page, index, x, y)
        yield x.value, y.value, x.value, y.value


def _is_unknown(character: str) -> bool:
    if " " <= character <= "~" or character in LINE_ENDS:
        return False
    return character == "\ufffd" or (unicodedata.category(character) in _UNKNOWN and character != "\t")


def _reads_like_words(text: str) -> bool:
    """Return whether a text looks like words: few control characters, and the vowels of the Latin alphabet or one other
    script. Codes of a font start with control characters, or spread over many scripts."""
    shown = [c for c in unicodedata.normalize("NFD", text).lower() if not c.isspace() and not unicodedata.combining(c)]
    if sum(unicodedata.category(c) in _UNKNOWN for c in shown) > _UNKNOWN_SHARE * len(shown):
        return False
    if any(sum(c in script for c in map(ord, shown)) >= _SCRIPT_SHARE * len(shown) for script in _SCRIPTS):
        return True
    latin = [c for c in shown if "a" <= c <= "z"]
    vowels, digits = sum(c in _VOWELS for c in latin), sum("0" <= c <= "9" for c in shown)
    least, most = _VOWELS_SHARE
    return len(latin) + digits >= _LETTERS_SHARE * len(shown) and least * len(latin) <= vowels <= most * len(latin)
