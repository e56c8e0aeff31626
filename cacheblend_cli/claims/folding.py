"""Text in a form to compare by, with every character in its place."""

from __future__ import annotations

import re
import unicodedata

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"
_QUOTES = "\u2018\u2019\u201a\u201b\u2032\u02bc\uff07"


CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Letters without capitals and spaces between words, for a character class of a regular expression."""
_CJK = re.compile(f"[{CJK}]")


class _Folded(dict[int, str]):
    """Code point -> the one character that it is compared by."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        folded = unicodedata.normalize("NFKC", char).casefold()
        if char in _DASHES:
            folded = "-"
        elif char in _QUOTES:
            folded = "'"
        elif char.isspace() and char != "\n":
            folded = " "
        self[code] = folded if len(folded) == 1 else char.lower() if len(char.lower()) == 1 else char
        return self[code]


_FOLDED = _Folded()
_BROKEN = re.compile(r"(?<=[^\W\d_])-\n[ ]*+(?=[^\W\d_])")
WORD = re.compile(r"\w++")


def folded(text: str) -> str:
    """Return the text in lower case, with digits, spaces, dashes and apostrophes of one kind, of the same length."""
    return text.translate(_FOLDED)


def words(text: str) -> list[str]:
    """Return the words of a folded text. Words that were divided at the end of a line are whole."""
    return WORD.findall(_BROKEN.sub("", text) if "-\n" in text else text)


def is_cjk(char: str) -> bool:
    return _CJK.match(char) is not None


def unaccented(text: str) -> str:
    return "".join(char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char))
