"""Texts to look claims up in: as written first, then by value or by words."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from cacheblend_cli.claims.figures import DIGITS, OTHER, POWERS, Figure, digits_of, figures_around, words_of
from cacheblend_cli.claims.wording import CJK, WORD, folded, is_cjk, unaccented, words

MAX_SEARCHED = 100_000_000
"""Characters that may be searched for the claims of one answer. The claims that are left are not reported."""
_BETWEEN = "\n\0\n"
_LONGEST = 400  # characters to look up
_STEP, _NEAR = 256, 16  # what a place that does not count costs, and one that may, in characters searched
_LETTER = re.compile(rf"(?![{CJK}])\w")
_CAPITAL = re.compile(r"(?<=[^\W\d_] )[A-Z][^\W\d_]{3,40}+")
_JOINS = frozenset(".,:'/+-")  # beside a digit they may belong to its figure
_GOES_ON = re.compile(rf"(?![{CJK}])\w|[.,:'/-]\d| ?(?:{'|'.join(map(re.escape, POWERS))})\b")


class Place(NamedTuple):
    """A place in the texts."""

    passage: int  # number of the text
    start: int  # -1 if unknown: words are divided at the end of a line, or stand apart
    end: int


class Passages:
    """Texts in folded form. A look-up returns places, at most one in each text, [] if there is none. What is in the
    texts as written is found in all of them, the rest in the first."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._raw = [folded(text) for text in texts], _BETWEEN.join(texts)
        self._starts = list(accumulate((len(text) + len(_BETWEEN) for text in self._texts), initial=0))
        self._all, self._left = _BETWEEN.join(self._texts), MAX_SEARCHED

    @property
    def is_spent(self) -> bool:
        """Return whether MAX_SEARCHED characters were searched. What was not found since then may be there."""
        return self._left <= 0

    def figure(self, figure: Figure, written: str) -> list[Place]:
        """Look a figure up: as it is written in the answer, then by its value."""
        if (found := self._written(written)) or self.is_spent:
            return found
        if figure.kind == "code":
            code, _, rest = written.rpartition("-")  # "TK-500-series"
            return self._written(code) if code and rest.isalpha() else []
        return self._valued(figure)

    def _written(self, text: str) -> list[Place]:
        """Look up a text that is no part of a longer word or figure."""
        found = list[Place]()
        at, has_digits, ends_in_cjk = -1, text[-1:].isdigit(), is_cjk(text[-1:])
        if len(text) > _LONGEST:
            return found
        while (at := self._all.find(text, at + 1)) >= 0:
            before, end = self._all[at - 1 : at], at + len(text)
            inside = (_LETTER.match(before) and not is_cjk(text[0])) or (text[0].isdigit() and before in _JOINS)
            if not inside and (ends_in_cjk or not (_GOES_ON if has_digits else _LETTER).match(self._all, end)):
                found.append(self._place(at, end))
                at = self._starts[found[-1].passage + 1] - 1  # the next text
            self._left -= _STEP
            if self.is_spent:
                break
        self._left -= len(self._all)
        return found

    def _place(self, start: int, end: int) -> Place:
        passage = bisect_right(self._starts, start) - 1
        return Place(passage, start - self._starts[passage], end - self._starts[passage])

    # figures by value

    def _valued(self, figure: Figure) -> list[Place]:
        """Return the place of the first figure of the same value."""
        for start, end in self._near(figure):
            self._left -= _STEP
            if self.is_spent:
                break
            for other in figures_around(self._all, start, end):
                if self._are_same(figure, other):
                    return [self._place(other.start, other.end)]
        return []

    def _near(self, figure: Figure) -> list[tuple[int, int]]:
        """Return the digits, words and addresses that a figure of the same value may have."""
        if any(len(value) > _LONGEST for value in figure.values) or self.is_spent:
            return []
        runs, near = self._digits, list[tuple[int, int]]()
        for digits in digits_of(figure):
            near += runs.get(digits, [])
            if figure.kind == "number":
                near += [span for n in range(1, len(digits)) for span in runs.get(digits[:n], [])]
                near += [span for run in runs if run[len(digits) :] and run.startswith(digits) for span in runs[run]]
        for text in words_of(figure) | (figure.values if figure.kind == "address" else frozenset()):
            near += [(at, at + len(text)) for at in _occurrences(self._all, text)]
        self._left -= _NEAR * (len(runs) + len(near))
        return sorted(near)

    @cached_property
    def _digits(self) -> dict[str, list[tuple[int, int]]]:
        """The places of digits in a row, without zeros in front."""
        runs: dict[str, list[tuple[int, int]]] = {}
        for found in DIGITS.finditer(self._all):
            runs.setdefault(found.group().lstrip("0") or "0", []).append(found.span())
        return runs

    def _are_same(self, figure: Figure, other: Figure) -> bool:
        """Compare a figure of the answer with one of the texts."""
        if not (figure.unit in ("", OTHER) or other.unit in ("", figure.unit)):
            return False
        values = set(_values(other, self._all[other.start : other.end]))
        for value in figure.values:
            year, _, day = value.partition("-")
            if f"{figure.kind}:{value}" in values or (
                figure.kind == "date" and f"date:-{day}!" in values and year in self._digits
            ):
                return True
        return False

    # names and quotations

    def wording(self, written: str, parts: Sequence[Sequence[str]], begins: bool = False) -> list[Place]:
        """Look a text up by its words. parts: each is found on its own; begins: the first word may be no part of it, if
        the texts have it in lower case."""
        if found := self._written(written):
            return found
        places = [self._part(part, begins and number == 0) for number, part in enumerate(parts)]
        return [] if None in places else [place for place in places[:1] if place is not None]

    def _part(self, part: Sequence[str], begins: bool) -> Place | None:
        found = self._run(part, gap=1)
        if found is None and len(part) == 2:  # Lind, Mara
            found = self._run(part[::-1])
        if found is None and begins and len(part) > 1 and f" {part[0]} " in self._raw:  # "Visit Bergen"
            found = self._part(part[1:], False)
        if found is None and len(part) > 2:
            each = [self._run((word,)) for word in part]
            found = None if None in each else each[0]
        return found

    def misspells(self, word: str) -> bool:
        """Return whether a word is in no text, and differs in one letter from a word that has its capital within a
        sentence."""
        low = folded(word)
        if self._written(low):
            return False
        return any(_is_one_off(low, name) and unaccented(low) != unaccented(name) for name in self._capitals)

    @cached_property
    def _capitals(self) -> set[str]:
        return {folded(word) for word in _CAPITAL.findall(self._raw)}

    @cached_property
    def _words(self) -> list[str]:
        return [f" {' '.join(words(text))} " for text in self._texts]

    def _run(self, run: Sequence[str], gap: int = 0) -> Place | None:
        """Find words in a row. The last may differ by a final "s". gap: words that may stand between two."""
        last = run[-1]
        wanted = [
            f" {' '.join((*run[:-1], form))} " for form in dict.fromkeys((last, last.removesuffix("s"), f"{last}s"))
        ]
        for number, text in enumerate(self._words):
            self._left -= len(text)
            if self.is_spent:
                return None
            if any(form in text for form in wanted) or (gap and len(run) == 2 and _has_gap(text, *run)):
                self._left -= 10 * len(text)
                return Place(number, *_span(self._texts[number], run))
        return None


def _occurrences(text: str, part: str) -> Iterator[int]:
    """Yield the places of a part, which is not empty."""
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + len(part))


def _has_gap(text: str, first: str, last: str) -> bool:
    """Return whether one word stands between two. text: words between single spaces."""
    ends = (text.find(" ", at + len(first) + 2) for at in _occurrences(text, f" {first} "))
    return any(text.startswith(f" {last} ", end) for end in ends)


def _span(text: str, run: Sequence[str]) -> tuple[int, int]:
    """Return start and end of words in a row, (-1, -1) if they are not whole in the text."""
    found = list(WORD.finditer(text))
    own = [word.group() for word in found]
    for at in (number for number, word in enumerate(own) if word == run[0]):
        if own[at : at + len(run)] == list(run):
            return found[at].start(), found[at + len(run) - 1].end()
    return -1, -1


def _is_one_off(a: str, b: str) -> bool:
    """Return whether one letter is changed, added or missing. The last one may be an inflection's."""
    a, b = sorted((a, b), key=len)
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return same < len(a) - 1 and len(b) - len(a) < 2 and a[same + (len(a) == len(b)) :] == b[same + 1 :]


def _values(figure: Figure, text: str) -> Iterator[str]:
    """Yield the values of a figure of a text, those of its parts included. text: the figure as it is written."""
    for value in figure.values:
        yield f"{figure.kind}:{value}"
        if figure.kind == "date":
            year, month, day = value.split("-")
            yield from (f"date:-{month}-{day}", f"date:{year}-{month}-", f"date:{year}--", f"date:-{month}-")
            yield from (f"number:{part}" for part in (year, day) if part)
            if not year:
                yield f"date:-{month}-{day}!"
    if figure.kind in ("time", "address"):
        yield from (f"number:{part.lstrip('0') or '0'}" for part in DIGITS.findall(text))
