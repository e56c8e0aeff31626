"""Number formats of spreadsheets (ECMA-376, part 1, 18.8.30): a stored number to the text of its cell."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import chain

BUILT_IN = {
    9: "0%", 10: "0.00%", 22: "yyyy-mm-dd hh:mm", 45: "mm:ss", 46: "[h]:mm:ss", 47: "mm:ss",
    **dict.fromkeys(chain(range(14, 18), range(27, 32), (36, 50, 51, 52, 53, 54, 57, 58)), "yyyy-mm-dd"),
    **dict.fromkeys((18, 19, 20, 21, 32, 33, 34, 35, 55, 56), "hh:mm"),
}  # fmt: skip
"""Identifier -> format, those without a format code in the file. Others are numbers without a unit."""

_DIGITS = 15  # significant digits of a number in a spreadsheet
_MOST_DIGITS = 400  # before or after the point; other numbers are damage
_DAY = 86_400
_LAST_DAY = 2_958_465  # 9999-12-31
_DAYS_1904 = 1462  # from the first day of one calendar to that of the other
_NO_LEAP_DAY = 60  # 1900-02-29, which spreadsheets count
_TOKEN = re.compile(
    r'"(?P<quoted>[^"]{0,99})"|\\(?P<escaped>.)|[_*].|\[\$(?P<unit>[^-\]]{0,99})[^\]]{0,99}\]'
    r"|\[(?P<elapsed>[hmsHMS]{1,9})\]|\[[^\]]{0,99}\]|[aA][mM]?/[pP][mM]?|(?P<other>.)",
    re.DOTALL,
)


@dataclass(frozen=True)
class _Format:
    has_date: bool = False
    has_time: bool = False
    is_elapsed: bool = False
    is_percent: bool = False
    before: str = ""  # unit, such as a currency
    after: str = ""
    thousands: int = 0  # powers of 1,000 that the cell leaves out
    zeros: int = 0  # digits with leading zeros


def cell_text(value: str, code: str, *, is_1904: bool = False) -> str:
    """Return the text of a number: dates and times in ISO 8601, other numbers with up to 15 digits and their unit.

    is_1904: the calendar of the workbook begins in 1904.
    """
    try:
        number = Decimal(value)
    except InvalidOperation:
        return value
    if not number.is_finite() or abs(number.adjusted()) > _MOST_DIGITS:
        return value
    style = _format(code[:255])
    if style.has_date or style.has_time:
        return _date(number + _DAYS_1904 * (is_1904 and style.has_date), style) or number_text(number)
    if style.zeros and number == number.to_integral_value() and 0 <= number < 10**_DIGITS:
        shown = str(int(number)).zfill(style.zeros)
    else:
        shown = number_text(abs(number) * (100 if style.is_percent else 1) / 1000**style.thousands)
    text = f"{style.before}{shown}{'%' if style.is_percent else ''}{style.after}"
    return f"-{text}" if number < 0 else text


def number_text(number: Decimal | float) -> str:
    """Return a number as spreadsheets show it in short: 0.3 for 0.1 + 0.2."""
    number = Decimal(number)
    if number == number.to_integral_value() and abs(number) < 10**21:
        return str(int(number))
    return f"{float(number):.{_DIGITS}g}"


def _date(serial: Decimal, style: _Format) -> str:
    """Return a date, a time or both; "" for a number outside of the calendar."""
    if not 0 <= serial <= _LAST_DAY:
        return ""
    seconds = round(serial * _DAY)
    if style.is_elapsed:
        return f"{seconds // 3600}:{seconds // 60 % 60:02}" + (f":{seconds % 60:02}" if seconds % 60 else "")
    days, rest = divmod(seconds, _DAY)
    moment = datetime(1899, 12, 31 if days < _NO_LEAP_DAY else 30) + timedelta(seconds=seconds)
    time = moment.strftime("%H:%M:%S" if rest % 60 else "%H:%M")
    if not style.has_date or not days:
        return time
    return f"{moment:%Y-%m-%d} {time}" if rest else f"{moment:%Y-%m-%d}"


@lru_cache(4096)
def _format(code: str) -> _Format:
    """Parse the first section of a format, that of positive numbers."""
    if code.lower() in ("", "general", "@"):
        return _Format()
    letters, digits, is_percent, is_elapsed = set[str](), "", False, False
    before, after = "", ""
    for token in _TOKEN.finditer(code):
        literal = token["quoted"] or token["escaped"] or token["unit"] or ""
        other = token["other"] or ""
        if other == ";":
            break
        if token["elapsed"]:
            is_elapsed = True
            letters.add("h")
        elif other and other in "0#?.,":
            digits, after = digits + other, ""
        elif other == "%":
            is_percent = True
        elif other == " " or (other and unicodedata.category(other) == "Sc"):
            literal = other
        elif other.isalpha() or other == "/":
            letters.add(other.lower())
        before, after = (before, after + literal) if digits else (before + literal, after)
    has_time = bool(letters & set("hs"))
    has_date = bool(letters & set("yd")) or ("m" in letters and not has_time)
    if has_date or has_time:
        return _Format(has_date, has_time, is_elapsed)
    if not digits.strip(",.") or letters:  # exponents, fractions
        return _Format(is_percent=is_percent and bool(digits))
    zeros = len(digits) if len(digits) > 1 and not digits.strip("0") else 0
    thousands, before = len(digits) - len(digits.rstrip(",")), before.lstrip()
    return _Format(is_percent=is_percent, before=before, after=after.rstrip(), thousands=thousands, zeros=zeros)
