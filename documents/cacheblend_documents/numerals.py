"""Numerals of lists: letters and Roman numbers."""

from __future__ import annotations

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
