"""Numbers of the items of a list, as people see them: 1. 2. 3., a. b. c., iv."""

from __future__ import annotations

from dataclasses import dataclass

from selectolax.lexbor import LexborNode

from cacheblend_documents.numerals import roman


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
