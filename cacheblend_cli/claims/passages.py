"""Texts to look claims up in: as written first, then by value or by words."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property, partial
from heapq import merge
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from cacheblend_cli.claims.figures import DIGITS, MINUS, Figure, figures, numbers_in_words, of_either_half
from cacheblend_cli.claims.units import ANY, POWERS, keys_for, keys_of
from cacheblend_cli.claims.words import CJK, WORD, folded, is_cjk, unaccented, words

MAX_STEPS = 200_000
"""Bound on the work for the claims of a request, in steps of one or two microseconds. The claims that are left
are not looked up."""
_SEARCHED, _READ = 2000, 10  # characters that a step searches for a text, and reads as words or figures
_PARSED = 5  # steps for a figure
_BETWEEN = "\n\0\n"
_LONGEST = 400  # characters to look up
_LETTER = re.compile(rf"(?![{CJK}])\w")
_CAPITAL = re.compile(r"(?<=[^\W\d_] )[A-Z][^\W\d_]{3,40}+")
_JOINS = frozenset(".,:'/+-")  # beside a digit they may belong to its figure
_GOES_ON = re.compile(rf"(?![{CJK}])\w|[.,:'/-]\d| ?(?:{'|'.join(map(re.escape, POWERS))})\b")
_VERSION = re.compile(r"v\d+(?:\.\d+)+")


class Place(NamedTuple):
    """A place in the texts."""

    passage: int  # number of the text
    start: int  # -1 if unknown: words are divided at the end of a line, or stand apart
    end: int


class Passages:
    """Texts of a request in folded form. A look-up returns places, at most one in each text, [] if there is none. What
    is in the texts as written is found in all of them, the rest in the first. Each claim is looked up once; a look-up
    returns None if MAX_STEPS were taken before."""

    def __init__(
        self, texts: Sequence[str], others: Sequence[str] = (), is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """others: further texts, which are named only if none of the first has a claim. is_cancelled: returns whether
        nothing more is to be looked up."""
        self.num_sources, self._is_cancelled = len(texts), is_cancelled
        texts = (*texts, *others)
        self._texts, self._raw = [folded(text) for text in texts], _BETWEEN.join(texts)
        self._starts = list(accumulate((len(text) + len(_BETWEEN) for text in self._texts), initial=0))
        self._all, self._left = _BETWEEN.join(self._texts), MAX_STEPS
        self._looked_up = dict[Hashable, list[Place]]()
        self._misspelled, self._left_out = dict[str, bool](), set[Hashable]()

    @property
    def num_left_out(self) -> int:
        """Return the number of claims that were not looked up."""
        return len(self._left_out)

    def figure(self, figure: Figure, written: str) -> list[Place] | None:
        """Look a figure up: as it is written in the answer, then by its value."""
        key = figure.kind, figure.values, figure.unit, written
        return self._once(key, partial(self._figure, figure, written))

    def wording(self, written: str, parts: Sequence[Sequence[str]], begins: bool = False) -> list[Place] | None:
        """Look a text up by its words. parts: each is found on its own; begins: the first word may be no part of it, if
        the texts have it in lower case."""
        key = written, tuple(map(tuple, parts)), begins
        return self._once(key, partial(self._wording, written, parts, begins))

    def spend(self, steps: int = 1) -> None:
        self._left = 0 if self._is_cancelled() else self._left - steps

    @property
    def _is_spent(self) -> bool:
        """Return whether MAX_STEPS were taken. What was not found since then may be there."""
        return self._left <= 0

    def _once(self, key: Hashable, look_up: Callable[[], list[Place]]) -> list[Place] | None:
        if (known := self._looked_up.get(key)) is not None:
            return known
        places = [] if self._is_spent else look_up()
        if not places and self._is_spent:
            self._left_out.add(key)
            return None
        self._looked_up[key] = places
        return places

    def _written(self, text: str) -> list[Place]:
        """Look up a text that is no part of a longer word or figure."""
        found = list[Place]()
        at, is_number, ends_in_digit, ends_in_cjk = -1, text[:1].isdigit(), text[-1:].isdigit(), is_cjk(text[-1:])
        if len(text) > _LONGEST:
            return found
        while (at := self._all.find(text, at + 1)) >= 0:
            before, end = self._all[at - 1 : at], at + len(text)
            inside = (_LETTER.match(before) and not is_cjk(text[:1])) or (
                is_number and (before in _JOINS or self._all.endswith(MINUS, 0, at))
            )
            if not inside and (ends_in_cjk or not (_GOES_ON if ends_in_digit else _LETTER).match(self._all, end)):
                found.append(self._place(at, end))
                at = self._starts[found[-1].passage + 1] - 1  # the next text
            self.spend()
            if self._is_spent:
                break
        self.spend(len(self._all) // _SEARCHED)
        return found

    def _place(self, start: int, end: int) -> Place:
        passage = bisect_right(self._starts, start) - 1
        return Place(passage, start - self._starts[passage], end - self._starts[passage])

    # figures by value

    def _figure(self, figure: Figure, written: str) -> list[Place]:
        if (found := self._written(written)) or self._is_spent:
            return found
        if figure.kind == "code" and not _VERSION.fullmatch(written):
            code, _, rest = written.rpartition("-")  # "TK-500-series"
            return self._written(code) if code and rest.isalpha() else []
        if figure.kind == "code":  # "version 5.2"
            figure = next(figures(written))._replace(unit="version")
        elif figure.kind == "time" and not written.rstrip(".").endswith("m"):
            figure = of_either_half(figure)
        first = min(filter(None, map(self._figures.get, self._keys(figure))), key=attrgetter("start"), default=None)
        return [] if first is None else [self._place(first.start, first.end)]

    @cached_property
    def _figures(self) -> dict[tuple[str, str], Figure]:
        """The first figure of the texts for each value and key of a unit."""
        first: dict[tuple[str, str], Figure] = {}
        self.spend(len(self._all) // _READ)
        for figure in merge(figures(self._all), numbers_in_words(self._all), key=attrgetter("start")):
            self.spend(_PARSED)
            if self._is_spent:
                break
            for value in _values(figure, self._all[figure.start : figure.end]):
                for unit in keys_of(figure.unit):
                    first.setdefault((value, unit), figure)
        return first

    @cached_property
    def _numbers(self) -> set[str]:
        return set(DIGITS.findall(self._all))

    def _keys(self, figure: Figure) -> Iterator[tuple[str, str]]:
        """Yield the keys of figures that are the same."""
        for value in figure.values:
            yield from ((f"{figure.kind}:{value}", unit) for unit in keys_for(figure.unit))
            year, _, day = value.partition("-")
            if figure.kind == "date" and year in self._numbers:
                yield f"date:-{day}!", ANY

    # names and quotations

    def _wording(self, written: str, parts: Sequence[Sequence[str]], begins: bool) -> list[Place]:
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
        if self._is_spent:
            self._left_out.add(low)
        elif low not in self._misspelled:
            self._misspelled[low] = not self._written(low) and self._is_near_name(low)
        return self._misspelled.get(low, False)

    def _is_near_name(self, low: str) -> bool:
        self.spend(len(self._capitals))
        return any(_is_one_off(low, name) and unaccented(low) != unaccented(name) for name in self._capitals)

    @cached_property
    def _capitals(self) -> set[str]:
        self.spend(len(self._raw) // _READ)
        return {folded(word) for word in _CAPITAL.findall(self._raw)}

    @cached_property
    def _words(self) -> list[str]:
        self.spend(len(self._all) // _READ)
        return [f" {' '.join(words(text))} " for text in self._texts]

    def _run(self, run: Sequence[str], gap: int = 0) -> Place | None:
        """Find words in a row. The last may differ by a final "s". gap: words that may stand between two."""
        last = run[-1]
        wanted = [
            f" {' '.join((*run[:-1], form))} " for form in dict.fromkeys((last, last.removesuffix("s"), f"{last}s"))
        ]
        for number, text in enumerate(self._words):
            self.spend(1 + len(wanted) * len(text) // _SEARCHED)
            if self._is_spent:
                return None
            if any(form in text for form in wanted) or (gap and len(run) == 2 and self._has_gap(text, *run)):
                return Place(number, *self._span(self._texts[number], run))
        return None

    def _has_gap(self, text: str, first: str, last: str) -> bool:
        """Return whether one word stands between two. text: words between single spaces."""
        at = text.find(f" {first} ")
        while at >= 0 and not self._is_spent:
            self.spend()
            if text.startswith(f" {last} ", text.find(" ", at + len(first) + 2)):
                return True
            at = text.find(f" {first} ", at + 1)
        return False

    def _span(self, text: str, run: Sequence[str]) -> tuple[int, int]:
        """Return start and end of words in a row, (-1, -1) if they are not whole in the text."""
        self.spend(len(text) // _READ)
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
