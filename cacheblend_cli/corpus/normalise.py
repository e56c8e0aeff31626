"""Words of texts for search, the same in documents and queries.

The index splits texts with FTS5's `unicode61`, which treats a run of letters as a word. Scripts that write no blanks
between words are cut into small tokens first, and so is Hangul, whose particles are joined to the noun. A query looks
for n-grams of them (phrases of n tokens):

| script                                             | tokens of the index       | terms of a query               |
|----------------------------------------------------|---------------------------|--------------------------------|
| Chinese characters, kana                           | characters                | characters                     |
| Hangul                                             | syllables                 | pairs of a word's syllables    |
| Thai, Lao, Khmer, Myanmar, Tai scripts, Javanese   | letters with their marks  | three letters with their marks |
| other                                              | words, with their marks   | words                          |
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

_HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # with kana
_HANGUL = "\uac00-\ud7a3"
# Blocks of Unicode: scripts without blanks, and scripts with vowel signs in words
_JOINED = (
    (0xE00, 0xF00), (0x1000, 0x10A0), (0x1780, 0x17E0), (0x1950, 0x19E0), (0x1A20, 0x1AB0), (0xA980, 0xAA00), (0xAA60, 0xAAE0),
)  # fmt: skip
_WITH_MARKS = ((0x483, 0x1AB0), (0x1B00, 0x1DC0), (0xA66F, 0xAC00), (0xFB1E, 0xFB1F))
_END = "\u115f"  # token after a word of Hangul, a letter without a glyph: phrases end at it
_NUM_TOGETHER = 3  # letters of a term in scripts without blanks
_WORD = re.compile(r"[^\W_]+")
# Vowel "am" of Thai and Lao, which NFKC takes apart, with the tone mark before or after the ring
_AM = re.compile("\u0e4d([\u0e48-\u0e4b]?)\u0e32|\u0ecd([\u0ec8-\u0ecb]?)\u0eb2")


def _characters(blocks: tuple[tuple[int, int], ...], category: str) -> str:
    """Return the characters of Unicode blocks. category: first letter of their general category, L or M."""
    every = (chr(code) for first, end in blocks for code in range(first, end))
    return "".join(c for c in every if unicodedata.category(c)[0] == category)


def fts5_tokenizer() -> str:
    """Return the `tokenize` option of the index: unicode61 with vowel signs of Indic and other scripts in words."""
    return f"porter unicode61 tokenchars '{_characters(_WITH_MARKS, 'M')}'"


class _Patterns(NamedTuple):
    unit: str  # letter with its marks in a script without blanks
    token: str  # token that is split off
    special: str  # character that the words of unicode61 do not handle
    run: str  # run of letters of one kind; groups: Hangul, script without blanks, other characters
    zero_width: str  # invisible blanks, which some writers put between the words of scripts without blanks


@lru_cache(maxsize=1)
def _patterns() -> _Patterns:
    """Build the patterns, on first use: such large character classes take milliseconds, and most commands do not need
    them."""
    letters, own_marks, marks = _characters(_JOINED, "L"), _characters(_JOINED, "M"), _characters(_WITH_MARKS, "M")
    unit = f"[{letters}][{own_marks}]*"
    other = f"(?:(?![{_HAN}{_HANGUL}{letters}])[^\\W_]|[{marks}])+"
    return _Patterns(
        unit,
        token=f"[{_HAN}{_HANGUL}]|{unit}",
        special=f"[{_HAN}{_HANGUL}{letters}{marks}]",
        run=f"([{_HANGUL}]+)|([{letters}][{letters}{marks}]*)|[{_HAN}]|{other}",
        zero_width=f"(?<=[{letters}{own_marks}])[\u200b\u2060]+",
    )


def indexed(text: str) -> str:
    """Return the text in the form of the index: `normalised`, then `spaced`."""
    return spaced(normalised(text))


def normalised(text: str) -> str:
    """Return the text in Unicode NFKC without soft hyphens and lone surrogates.

    NFKC splits ligatures, maps full-width forms to letters and composes Hangul: PDFs often write the "ffi" of "Office"
    as one character.
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text).replace("\u00ad", "").encode("utf-8", "replace").decode("utf-8")
    text = _AM.sub(lambda am: f"{am[1]}\u0e33" if am[1] is not None else f"{am[2]}\u0eb3", text)
    return re.sub(_patterns().zero_width, "", text)


def spaced(text: str) -> str:
    """Put blanks around every character of a script without blanks, and around every syllable of Hangul."""
    if text.isascii():
        return text
    text = re.sub(_patterns().token, r" \g<0> ", text)
    return re.sub(f"([{_HANGUL}] )(?! [{_HANGUL}])", rf"\1{_END} ", text)


def unspaced(text: str) -> str:
    """Undo `spaced`."""
    return text if text.isascii() else re.sub(f" ({_patterns().token}) ", r"\1", re.sub(f"{_END} ?", "", text))


def search_words(text: str) -> Iterator[tuple[str, float]]:
    """Yield the words of a text and their weights; n-grams of scripts without blanks have blanks between the tokens.

    The later a pair of syllables comes in a Korean word, the less it weighs: nouns come before their particles.
    """
    if text.isascii() or not re.search(_patterns().special, text):
        yield from ((word, 1.0) for word in _WORD.findall(text))
        return
    for run in re.finditer(_patterns().run, text):
        if run[1]:
            pairs = zip(run[1], run[1][1:], strict=False)
            yield from ((" ".join(pair), 1 / number) for number, pair in enumerate(pairs, 1))
            if len(run[1]) == 1:
                yield run[1], 1.0
        elif run[2]:
            units = re.findall(_patterns().unit, run[2])
            for first in range(max(len(units) - _NUM_TOGETHER, 0) + 1):
                yield " ".join(units[first : first + _NUM_TOGETHER]), 1.0
        elif not run[0].isspace() and _WORD.search(run[0]):
            yield run[0], 1.0
