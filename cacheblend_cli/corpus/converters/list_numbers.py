"""Numbers of the items of a list, as people see them: 1. 2. 3., a. b. c., iv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_ROMAN = {
    1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix", 5: "v", 4: "iv", 1: "i",
}  # fmt: skip


@dataclass
class ListNumbers:
    number: int  # of the next item
    step: int = 1
    kind: str = "1"  # "1", "a", "A", "i" or "I", as in HTML

    @classmethod
    def of(cls, node: LexborNode) -> ListNumbers:
        """Return the numbers of an <ol>."""
        attributes, is_reversed = node.attributes, "reversed" in node.attributes
        first = sum(child.tag == "li" for child in node.iter()) if is_reversed else 1
        return cls(_integer(attributes.get("start"), first), -1 if is_reversed else 1, attributes.get("type") or "1")

    def next(self, value: str | None) -> str:
        """Return the number of the next item, "3.". value: the number that the item has itself."""
        number = _integer(value, self.number)
        self.number = number + self.step
        return f"{numeral(number, self.kind)}."


def numeral(number: int, kind: str) -> str:
    """Write a number in digits, letters or Roman numerals."""
    if kind in ("a", "A") and number > 0:
        letters = ""
        while number:
            number, letter = divmod(number - 1, 26)
            letters = chr(ord(kind) + letter) + letters
        return letters
    if kind in ("i", "I") and 0 < number < 4000:
        roman = ""
        for value, letters in _ROMAN.items():
            count, number = divmod(number, value)
            roman += letters * count
        return roman.upper() if kind == "I" else roman
    return str(number)


def _integer(value: str | None, otherwise: int) -> int:
    digits = (value or "").strip()
    return int(digits) if digits.removeprefix("-").isdecimal() and len(digits) < 10 else otherwise
