"""Look up the figures, names and quotations of an answer in the texts of its prompt. No model is involved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cacheblend_cli.claims.figures import Figure, codes, figures, numbers_in_words
from cacheblend_cli.claims.passages import Passages, Place
from cacheblend_cli.claims.units import is_known
from cacheblend_cli.claims.words import folded, names, quotes, words
from cacheblend_cli.types import ClaimKind

_WORDS_THAT_COUNT = 12  # up to this number a word without a unit ("two ways") is no claim


@dataclass(frozen=True)
class LookedUp:
    """A part of an answer that was looked up."""

    text: str
    start: int  # in the answer
    end: int
    kind: ClaimKind
    place: Place | None  # None if no text has it; of several texts the one with most of the answer's claims


def check(answer: str, texts: Sequence[str] | Passages) -> list[LookedUp]:
    """Return the parts of the answer that can be looked up, in their order. texts: those the answer may come from.

    These are numbers with their units, dates, times, codes, addresses, quotations and names. What an answer derives (a
    sum, a number of days) is in no text either. Takes linear time; what exceeds `passages.MAX_STEPS` is left out.
    """
    plain, passages = folded(answer), texts if isinstance(texts, Passages) else Passages(texts)
    taken, found = bytearray(len(answer)), list[tuple[int, int, ClaimKind, list[Place]]]()

    def add(start: int, end: int, kind: ClaimKind, places: list[Place] | None) -> None:
        taken[start:end] = b"\1" * (end - start)
        if places is not None:
            found.append((start, end, kind, places))

    for start, end in quotes(answer):
        if run := words(plain[start:end]):
            add(start, end, "quote", passages.wording(plain[start:end], [run]))
    for figure in (*codes(plain), *figures(plain), *numbers_in_words(plain)):
        if any(taken[figure.start : figure.end]) or _is_numbering(plain, figure) or _is_small_word(plain, figure):
            continue
        places = passages.figure(figure, plain[figure.start : figure.end])
        add(figure.start, figure.end, figure.kind, places)
    for name in names(answer):
        if any(taken[name.start : name.end]):
            continue
        if not name.is_doubtful or passages.misspells(answer[name.start : name.end]):
            places = passages.wording(plain[name.start : name.end], name.parts, name.begins)
            add(name.start, name.end, "name", places)
    best = _best({id(places): places for *_, places in found}, passages)
    return [
        LookedUp(answer[start:end], start, end, kind, best[id(places)]) for start, end, kind, places in sorted(found)
    ]


def _best(found: Mapping[int, list[Place]], passages: Passages) -> dict[int, Place | None]:
    """Choose one place of each claim: of the sources that have it, the one with most of the claims."""
    passages.spend(sum(map(len, found.values())))
    shared = Counter(place.passage for places in found.values() for place in places)

    def worth(place: Place) -> tuple[bool, int, int]:
        return place.passage < passages.num_sources, shared[place.passage], -place.passage

    return {number: max(places, key=worth, default=None) for number, places in found.items()}


def _is_numbering(text: str, figure: Figure) -> bool:
    """Return whether a figure numbers an item of a list."""
    if figure.kind != "number" or text[figure.end : figure.end + 1] not in (".", ")"):
        return False
    before = text[max(0, figure.start - 40) : figure.start].rpartition("\n")[2]
    return not before.strip(" *#>-") and figure.end - figure.start <= 3


def _is_small_word(text: str, figure: Figure) -> bool:
    """Return whether a figure is a word for a small number, without a unit."""
    is_word = not text[figure.start : figure.end].strip("-+ ")[:1].isdigit()
    if figure.kind != "number" or is_known(figure.unit) or not is_word:
        return False
    return any(len(value) < 3 and value.isdigit() and int(value) <= _WORDS_THAT_COUNT for value in figure.values)
