"""Numbers, dates, times, codes and addresses in a text, in a form to compare by.

No pattern tries the same characters twice: repeats are possessive, or of bounded length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from cacheblend_cli.claims.units import POWERS, SYMBOLS, TEMPERATURES, UNITS, unit_behind, unit_of
from cacheblend_cli.claims.words import CJK

Kind = Literal["number", "date", "time", "code", "address"]


class Figure(NamedTuple):
    """A figure of a text. values: what it may mean, in one form; unit: of a number, "" or OTHER."""

    start: int
    end: int
    kind: Kind
    values: frozenset[str]
    unit: str = ""


_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "january jan januar janvier jänner enero gennaio januari",
            "february feb februar février fevrier febrero febbraio februari",
            "march mar märz mars marzo maart",
            "april apr avril abril aprile",
            "may mai mayo maggio mei",
            "june jun juni juin junio giugno",
            "july jul juli juillet julio luglio",
            "august aug août aout agosto augustus",
            "september sep sept septembre septiembre settembre",
            "october oct oktober okt octobre octubre ottobre",
            "november nov novembre noviembre",
            "december dec dezember dez décembre decembre diciembre dicembre",
        ),
        1,
    )
    for name in names.split()
}
_ONES = {
    word: number
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen".split()
    )
}
_TENS = {
    word: number * 10 for number, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_SMALL = "|".join(sorted([*_ONES, *_TENS, "hundred"], key=len, reverse=True))
_LETTER = rf"[^\W\d_{CJK}]"
MINUS = ("minus ", "moins ", "menos ")
_MINUS = "|".join(word.replace(" ", "[ ]") for word in MINUS)
_MARK = rf"(?:(?<!\w)|(?<=[{CJK}])|(?<=\bv)(?=\d+\.\d))"  # before a figure: no letter or digit, but the v of a version
_WORD = rf"{_LETTER}{{1,12}}+(?:/{_LETTER}{{1,12}}+)?+"
_PATTERN = re.compile(
    rf"""(?P<address>(?:https?://|www\.)[^\s<>"'()\[\]{{}}|\\^`]++|[\w.+-]{{1,64}}+@[\w-]{{1,63}}+(?:\.[\w-]{{1,63}}+)++)
    |{_MARK}(?=\w)(?:
    (?P<ymd>\d{{4}}(?P<sep>[-/.])\d{{1,2}}(?P=sep)\d{{1,2}}(?![\d\w]))
    |(?P<dmy>\d{{1,2}}(?P<of>[-/.])\d{{1,2}}(?P=of)(?:\d{{4}}|\d{{2}})(?![\d\w]))
    |(?P<cjk>\d{{4}}[ ]?年(?:[ ]?\d{{1,2}}[ ]?月(?:[ ]?\d{{1,2}}[ ]?日)?)?|\d{{1,2}}[ ]?月[ ]?\d{{1,2}}[ ]?日)
    |(?P<dm>(?P<d>\d{{1,2}})(?:st|nd|rd|th|er|\.)?[ ]{{1,2}}(?:of[ ]|de[ ])?(?P<m>{_MONTH})\b\.?(?:,?[ ]{{1,2}}(?:de[ ])?(?P<y>\d{{4}})\b)?)
    |(?P<md>(?P<m2>{_MONTH})\b\.?[ ]{{1,2}}(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?(?![\d\w:.]\d|\w)(?:,?[ ]{{1,2}}(?P<y2>\d{{4}})\b)?)
    |(?P<my>(?P<m3>{_MONTH})\b\.?,?[ ]{{1,2}}(?P<y3>\d{{4}})\b)
    |(?P<time>(?P<hour>\d{{1,2}})(?:(?::|h|[ ]h[ ])(?P<minute>\d{{2}})(?::\d{{2}})?(?!\d)(?:[ ]?(?P<half>[ap])(?:\.m\.|m\b))?
        |[ ]?(?P<half2>[ap])(?:\.m\.|m\b)|(?:\.(?P<minute2>\d{{2}}))?(?:[ ]uhr\b|(?=[ ](?:bis|und|-)[ ]\d{{1,2}}(?:\.\d{{2}})?[ ]uhr\b))|[ ]?(?P<cjk_clock>[点點时時])(?:(?P<minute3>\d{{1,2}})分)?))
    )
    |(?P<number>(?=[-+\dm{SYMBOLS}])(?P<sign>(?:(?<![\w)])|(?<=[{CJK}]))[-+]|\b(?:{_MINUS}))?(?:(?P<before>[{SYMBOLS}])[ ]?)?
        {_MARK}(?P<digits>\d++(?:[.,']\d++)*+(?:[ ]\d{{3}}(?!\d))*+(?:[.,]\d++)?+)
        (?:st|nd|rd|th)?+(?:-?[ ]?(?P<after>(?:per|pour)[ ]cent|[万亿]|(?:[{SYMBOLS}]|°[cf])(?:/{_LETTER}{{1,12}}+)?+|{_WORD}))?+
        (?:(?=[ ](?P<more>[{SYMBOLS}]|{_LETTER}{{1,12}}+)))?)
    """,
    re.VERBOSE,
)
_IN_WORDS = re.compile(
    rf"\b(?P<sign>(?:{_MINUS}))?+(?P<word>(?:{_SMALL})\b(?:[- ](?:and )?(?:{_SMALL})\b)*+)(?:[- ](?P<unit>{_WORD}))?+(?:(?=[ ](?P<more>{_LETTER}{{1,12}}+)))?"
)
_HALF_DAYS = re.compile(
    r"(?:\b|\d)[ap]\.?m\b|\b(?:afternoon|evening|night|nachmittag|abend|nacht|soir|après-midi|tarde|noche|sera|notte|pomeriggio)"
)  # near a time from 1 to 12 they may say which half of the day it is
_CODE = re.compile(r"(?<!\w)\w++(?:[-_/.:#]\w++)*+")
DIGITS = re.compile(r"\d++")
_HOURS = re.compile(r"\d{1,2}h(?:\d{2})?")  # 11h30
_ADDRESSES = re.compile(r"://|www\.|@")
_BEFORE, _AFTER = 24, 48  # characters around digits that may belong to their figure


def figures(text: str) -> Iterator[Figure]:
    """Yield the figures with digits, and addresses, of a folded text, from left to right."""
    for start, end in _windows(text):
        yield from _figures(text, start, end)


def _figures(text: str, start: int, end: int) -> Iterator[Figure]:
    for found in _PATTERN.finditer(text, start, end):
        g = found.group
        if g("number") is not None:
            yield _number(found)
        elif g("address") is not None:
            yield _address(found)
        elif g("time") is not None:
            yield _time(found)
        else:
            yield _date(found)


def _windows(text: str) -> Iterator[tuple[int, int]]:
    """Yield the parts of a text that may have figures: few, in most texts."""
    start = end = -1
    for found in sorted(m.span() for pattern in (DIGITS, _ADDRESSES) for m in pattern.finditer(text)):
        if end < 0:
            start = max(0, found[0] - _BEFORE)
        elif found[0] - _BEFORE > end:
            yield start, end
            start = found[0] - _BEFORE
        end = max(end, found[1] + _AFTER)
    if end >= 0:
        yield start, end


def numbers_in_words(text: str) -> Iterator[Figure]:
    """Yield numbers below 1,000 in English words."""
    for found in _IN_WORDS.finditer(text):
        value = _value_of_words(found["word"])
        if value is not None:
            unit = unit_behind(found["unit"] or "", found["more"] or "")
            last = found.end("unit" if unit_of(found["unit"] or "") else "word")
            values = _signed(frozenset({value}), found["sign"] or "", unit)
            yield Figure(found.start(), last, "number", values, unit)


def codes(text: str) -> Iterator[Figure]:
    """Yield identifiers: letters with digits, or words with underscores between them."""
    for found in _CODE.finditer(text):
        code = found.group()
        if len(code) <= 200 and _is_code(code):
            yield Figure(found.start(), found.end(), "code", frozenset({code}))


def _is_code(text: str) -> bool:
    if "_" in text.strip("_"):
        return True
    if not DIGITS.search(text) or not text.isascii() or _HOURS.fullmatch(text):
        return False
    changes = sum(a.isalpha() != b.isalpha() for a, b in pairwise(text) if (a + b).isalnum())
    return text[0].isalpha() if changes < 2 or "/" in text else True


def _address(found: re.Match[str]) -> Figure:
    text = found.group().rstrip(".,;:!?*")
    plain = re.sub(r"^(?:https?://)?(?:www\.)?", "", text).rstrip("/")
    return Figure(found.start(), found.start() + len(text), "address", frozenset({plain} - {""}))


def _number(found: re.Match[str]) -> Figure:
    g, end = found.group, found.end("digits")
    before, after, more = g("before") or "", g("after") or "", g("more") or ""
    values = _decimals(g("digits"))
    unit = UNITS.get(before, before) or unit_behind(after, more)
    if after in POWERS:
        values = (values if after in UNITS else frozenset()) | {_shifted(value, POWERS[after]) for value in values}
        end = found.end("more" if more in UNITS else "after")
    elif unit_of(after):
        end = found.end("after")
    elif after and end == found.start("after"):  # 45B, 12th and the like
        return Figure(found.start("digits"), found.end("after"), "code", frozenset({g("digits") + after}))
    sign = g("sign") or ""
    if sign == "-" and not found.string[max(0, found.start() - 8) : found.start()].rpartition("\n")[2].strip():
        sign = "- "  # at the start of a line it may mark an item
    return Figure(found.start(), end, "number", _signed(values, sign, unit), unit)


def _signed(values: frozenset[str], sign: str, unit: str) -> frozenset[str]:
    """Return the values with their sign. A word for minus may subtract, except from temperatures."""
    if sign in ("", "+"):
        return values
    negative = frozenset("-" + value for value in values)
    return negative if sign == "-" or unit in TEMPERATURES else values | negative


def _decimals(digits: str) -> frozenset[str]:
    """Return the decimal numbers that digits with separators may mean, without superfluous zeros: 1.234 is two."""
    plain = digits.replace(" ", "").replace("'", "")
    marks = [c for c in plain if c in ".,"]
    if not marks:
        return frozenset({_decimal(plain, "")})
    last = marks[-1]
    if len(set(marks)) == 2:  # the last mark is the decimal one, if there is one of it
        if marks.count(last) > 1:
            return frozenset({plain})
        whole, _, part = plain.rpartition(last)
        return frozenset({_decimal(whole.replace(".", "").replace(",", ""), part)})
    groups = plain.split(last)
    of_thousands = len(groups[0]) <= 3 and groups[0] != "0" and all(len(group) == 3 for group in groups[1:])
    if len(groups) > 2:
        return frozenset({_decimal("".join(groups), "")} if of_thousands else {plain})
    values = {_decimal(groups[0], groups[1])}
    return frozenset(values | {_decimal("".join(groups), "")} if of_thousands else values)


def _decimal(whole: str, part: str) -> str:
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole


def _shifted(value: str, power: int) -> str:
    whole, _, part = value.partition(".")
    return _decimal(whole + part[:power].ljust(power, "0"), part[power:])


def _value_of_words(text: str) -> str | None:
    """Return the value of a number below 1,000 in English words; None if the words are no number."""
    total, last = 0, 1000
    for word in re.split(r"[- ]+", text):
        if word == "and":
            continue
        if word == "hundred":
            if not 0 < total < 10:
                return None
            total, last = total * 100, 100
            continue
        value = _ONES.get(word, _TENS.get(word, -1))
        if value < 0 or (last < 1000 and (value >= last or (last < 100 and (last < 20 or value == 0 or value > 9)))):
            return None
        total, last = total + value, value
    return str(total)


def _time(found: re.Match[str]) -> Figure:
    g = found.group
    hour, minute = int(g("hour")), int(g("minute") or g("minute2") or g("minute3") or 0)
    if hour > 24 or minute > 59:
        return Figure(*found.span(), "time", frozenset())  # found only as it is written
    half = g("half") or g("half2")
    hours = {hour % 12 + 12 * (half == "p")} if half else {hour % 24}
    if not half and (g("cjk_clock") or _HALF_DAYS.search(found.string, max(0, found.start() - 24), found.end() + 24)):
        hours |= {hour % 12 + 12} if hour <= 12 else set()
    return Figure(*found.span(), "time", frozenset(f"{h % 24}:{minute:02}" for h in hours))


def of_either_half(time: Figure) -> Figure:
    """Return a time that does not say which half of the day it is with both values."""
    hours = [(int(value[:-3]), value[-3:]) for value in time.values]
    return time._replace(values=time.values | {f"{h % 12 + 12}{minute}" for h, minute in hours if 0 < h < 12})


def _date(found: re.Match[str]) -> Figure:
    """Return a date. Its values are YEAR-MONTH-DAY, with nothing for a part that is not given."""
    g = found.group
    if g("ymd"):
        year, month, day = re.split(r"[-/.]", g())
        dates = [(year, month, day)]
    elif g("dmy"):
        a, b, year = re.split(r"[-/.]", g())
        year = year if len(year) == 4 else f"20{year}"
        dates = [(year, b, a)] + ([(year, a, b)] if g("of") != "." else [])
    elif g("cjk"):
        parts = re.findall(r"\d+", g())
        dates = [("", *parts) if "年" not in g() else (*parts, "", "")[:3]]
    else:
        name = g("m") or g("m2") or g("m3")
        dates = [(g("y") or g("y2") or g("y3") or "", str(_MONTHS[name]), g("d") or g("d2") or "")]
    values = {
        f"{year}-{int(month) if month else ''}-{int(day) if day else ''}"
        for year, month, day in dates
        if (not month or 0 < int(month) < 13) and (not day or 0 < int(day) < 32)
    }
    return Figure(*found.span(), "date", frozenset(values))
