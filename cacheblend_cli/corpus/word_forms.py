"""Forms in which a word of a query can stand in a text, as FTS5 strings."""

from __future__ import annotations

import re
from collections.abc import Iterator

_IRREGULAR = (
    "child children", "person people", "man men", "woman women", "foot feet", "tooth teeth", "mouse mice", "goose geese",
    "knife knives", "shelf shelves", "half halves", "criterion criteria",
)  # fmt: skip
"""English plurals that the stemmer does not know."""
_OTHER_NUMBER = {one: other for pair in _IRREGULAR for one, other in (pair.split(), pair.split()[::-1])}
# 1,250,000 and 00:1B:44:11:3A:B7
_SEPARATED = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:[,.'\u2019]\d{3})+|[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5})(?!\w)")
_MOST_CHARACTERS = 34  # of a figure or a number of letters and digits, such as an IBAN
_LEAST_LETTERS, _SHARE = 4, 0.6
"""A word's beginning: this share of its letters, but at least so many."""


def joined(text: str) -> str:
    """Return a query with its figures and addresses of devices without separators."""
    return _SEPARATED.sub(lambda figure: re.sub(r"\W", "", figure[0]), text)


def forms(word: str) -> Iterator[str]:
    """Yield a word as it is, in its other number if that is irregular, and figures with blanks where a text can have
    separators: 1250000 as 1 250 000, 001b44113ab7 as 00 1b 44 11 3a b7, 30am as 30 am."""
    yield f'"{word}"'
    if word in _OTHER_NUMBER:
        yield f'"{_OTHER_NUMBER[word]}"'
    if 3 < len(word) <= _MOST_CHARACTERS and re.search(r"\d", word) and " " not in word:
        first = len(word) % 3
        thousands = [word[:first], *(word[i : i + 3] for i in range(first, len(word), 3))]
        others = ([word[i : i + size] for i in range(0, len(word), size)] for size in (2, 4))
        for parts in (thousands, *others, re.findall(r"\d+|\D+", word)):
            yield f'"{" ".join(filter(None, parts))}"'


def beginning(word: str) -> str:
    """Return the beginning of a word, which inflected forms and compounds share; "" for a short word or a figure."""
    length = max(_LEAST_LETTERS, int(_SHARE * len(word)))
    return "" if len(word) < length or re.search(r"[\d ]", word) else f'"{word[:length]}"*'
