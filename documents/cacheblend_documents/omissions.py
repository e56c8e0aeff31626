"""Parts that a converter leaves out of a document, in words: "2 charts (slides 3, 5)", "page 2 cannot be read"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

_MOST_PLACES = 8  # places to name for one kind of thing
_MOST_CHARACTERS = 120  # of the places to name, besides the first
_NUMBERED = ("page ", "slide ", "sheet ", "line ", "cell ", "mail ")


class Omissions:
    """Collects what is left out. Equal things are counted, with the first places."""

    def __init__(self) -> None:
        self._counts = dict[tuple[str, str], int]()  # (singular, plural) -> count
        self._places = dict[tuple[str, str], dict[str, None]]()
        self._said = dict[str, None]()

    def add(self, thing: str, place: str = "", *, count: int = 1, plural: str = "") -> None:
        """Count a thing, such as "chart" at "slide 3". plural: by default with an "s"."""
        key = thing, plural or f"{thing}s"
        self._counts[key] = self._counts.get(key, 0) + count
        places = self._places.setdefault(key, {})
        if place and len(places) <= _MOST_PLACES:
            places[place] = None

    def say(self, sentence: str) -> None:
        """Add a whole sentence, such as "page 2 cannot be read"."""
        self._said[sentence] = None

    def __iter__(self) -> Iterator[str]:
        for key, count in self._counts.items():
            where = f" ({_named(places)})" if (places := list(self._places[key])) else ""
            yield f"{count:,} {key[count != 1]}{where}"
        yield from self._said


def number_ranges(numbers: Sequence[int]) -> list[str]:
    """Return sorted numbers as ranges: "2-4", "7"."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda place: place[1] - place[0])]
    return [f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]


def _named(places: list[str]) -> str:
    """Return the first places in words, such as "slides 3, 5"."""
    kind = next((kind for kind in _NUMBERED if all(place.startswith(kind) for place in places)), "")
    named, length = list[str](), 0
    for place in places[:_MOST_PLACES]:
        name = place.removeprefix(kind)
        length += len(name) + 2
        if named and length > _MOST_CHARACTERS:
            break
        named.append(name)
    prefix = f"{kind.strip()}{'s' * (len(places) > 1)} " if kind else ""
    return prefix + ", ".join(named) + ", ..." * (len(named) < len(places))
