"""Superscripts of a PDF page: small characters right after another one, above its baseline."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile

from cacheblend_documents.inline_marks import superscript
from cacheblend_documents.pdf.lines import Box, has_right_to_left

_SMALL = 0.4, 0.9  # height of a superscript, in heights of the character before it
_RAISED = 0.12, 0.7  # its baseline above the other one
_GAP = -0.3, 0.1  # between neighbours
_LONGEST = 8  # characters of a superscript


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of a page, their boxes, and the places of the pen before each is drawn."""

    text: str
    boxes: Sequence[Box]
    pens: Sequence[Box]

    def with_superscripts(self) -> Glyphs:
        """Return the characters with superscripts as in "10^6", without the blanks that PDFium adds around them."""
        shown = [n for n, box in enumerate(self.boxes) if box[2] > box[0] or not self.text[n].isspace()]
        texts, places, start = list[str](), list[int](), 0
        for at, (base, first) in enumerate(pairwise(shown), 1):
            if base < start or self._height(first) > _SMALL[1] * self._height(base):
                continue
            pairs = takewhile(partial(self._is_raised, base), pairwise(shown[at - 1 : at + _LONGEST + 1]))
            raised = [n for _, n in pairs]
            if 0 < len(raised) <= _LONGEST:
                written = superscript("".join(self.text[n] for n in raised), self.text[base])
                texts += self.text[start : base + 1], written
                places += range(start, base + 1)
                places += (raised[min(n, len(raised) - 1)] for n in range(len(written)))
                after = shown[at + len(raised) : at + len(raised) + 1]
                goes_on = after and self._is_beside(base, (raised[-1], after[0]))
                start = after[0] if goes_on else raised[-1] + 1
        texts.append(self.text[start:])
        places += range(start, len(self.text))
        return Glyphs("".join(texts), [self.boxes[n] for n in places], [self.pens[n] for n in places])

    def _is_raised(self, base: int, pair: tuple[int, int]) -> bool:
        """Return whether the second of two neighbours is part of a superscript after `base`."""
        height, own = self._height(base), self._height(pair[1])
        lift = self.pens[pair[1]][1] - self.pens[base][1]
        is_small = _SMALL[0] * height <= own <= _SMALL[1] * height
        is_high = _RAISED[0] * height <= lift <= _RAISED[1] * height
        return is_small and is_high and _may_have(self.text[base]) and self._is_beside(base, pair)

    def _is_beside(self, base: int, pair: tuple[int, int]) -> bool:
        gap, height = self.boxes[pair[1]][0] - self.boxes[pair[0]][2], self._height(base)
        return not self.text[pair[1]].isspace() and _GAP[0] * height <= gap <= _GAP[1] * height

    def _height(self, n: int) -> float:
        return self.boxes[n][3] - self.boxes[n][1]


def _may_have(character: str) -> bool:
    """Return whether a superscript can follow: not in columns of characters, nor in text from right to left."""
    return unicodedata.east_asian_width(character) not in "WF" and not has_right_to_left(character)
