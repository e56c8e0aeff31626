"""Numbers of list items, as people see them: 1. 2. 3., a. b. c., iv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ROMAN = {
    1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix", 5: "v", 4: "iv", 1: "i",
}  # fmt: skip


def roman(number: int) -> str:
    """Write a number from 1 to 3,999 as a Roman number in lower case, others in digits."""
    if not 0 < number < 4000:
        return str(number)
    text = ""
    for value, letters in _ROMAN.items():
        count, number = divmod(number, value)
        text += letters * count
    return text


def repeated_letter(number: int) -> str:
    """Write a number from 1 to 260 as Office programs do: a to z, then aa, bb; others in digits."""
    return chr(ord("a") + (number - 1) % 26) * ((number + 25) // 26) if 0 < number <= 260 else str(number)


@dataclass
class ListNumbers:
    """Numbers of a list of HTML."""

    number: int  # of the next item
    step: int = 1
    kind: str = "1"  # "1", "a", "A", "i" or "I", as in HTML

    @classmethod
    def of(cls, attributes: Mapping[str, str | None], num_items: int) -> ListNumbers:
        """Return the numbers of an <ol>."""
        is_reversed = "reversed" in attributes
        first = num_items if is_reversed else 1
        return cls(_integer(attributes.get("start"), first), -1 if is_reversed else 1, attributes.get("type") or "1")

    def next(self, value: str | None) -> str:
        """Return the number of the next item, "3.". value: the number that the item has itself."""
        number = _integer(value, self.number)
        self.number = number + self.step
        return f"{_numeral(number, self.kind)}."


def _numeral(number: int, kind: str) -> str:
    """Write a number in digits, letters or Roman numerals."""
    if kind in ("a", "A") and number > 0:
        letters = ""
        while number:
            number, letter = divmod(number - 1, 26)
            letters = chr(ord(kind) + letter) + letters
        return letters
    if kind in ("i", "I"):
        return roman(number).upper() if kind == "I" else roman(number)
    return str(number)


def _integer(value: str | None, otherwise: int) -> int:
    digits = (value or "").strip()
    return int(digits) if digits.removeprefix("-").isdecimal() and len(digits) < 10 else otherwise
