"""Numbers, dates, times, codes and addresses in a text, in a form to compare by.

No pattern tries the same characters twice: repeats are possessive, or of bounded length.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from cacheblend_cli.claims.wording import CJK

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
_UNITS = {
    form: unit
    for unit, forms in {
        "%": "% percent prozent pourcent",
        "eur": "€ eur euro euros", "usd": "$ usd dollar dollars", "gbp": "£ gbp pound pounds", "chf": "chf franken", "yen": "¥ yen jpy",
        "nok": "nok kr kroner", "s": "s sec second seconds sekunde sekunden seconde secondes", "min": "min mins minute minutes minuten",
        "h": "h hr hrs hour hours stunde stunden heure heures", "day": "day days tag tage tagen jour jours",
        "week": "week weeks woche wochen semaine semaines", "month": "month months monat monate monaten mois",
        "year": "year years jahr jahre jahren an ans année années", "ms": "ms millisecond milliseconds",
        "km": "km kilometer kilometers kilometre kilometres", "m": "m meter meters metre metres mètre mètres", "cm": "cm", "mm": "mm",
        "mi": "mile miles", "kg": "kg kilo kilos kilogram kilograms", "g": "g gram grams gramm", "t": "ton tons tonne tonnes",
        "l": "l liter liters litre litres", "kb": "kb kib", "mb": "mb mib", "gb": "gb gib", "tb": "tb tib", "w": "w watt watts", "kw": "kw",
        "kwh": "kwh", "v": "v volt volts", "c": "°c ℃", "f": "°f ℉",
    }.items()
    for form in forms.split()
} | {"per cent": "%", "pour cent": "%"}  # fmt: skip
OTHER = "?"
"""Unit of a number before a word that is no known unit."""
_NO_UNITS = frozenset(
    "a an per each every to and or of in on at by for from is was are were the than with bis und oder pro je von im am der die das "
    "à et ou de par en au le la les est sont a y o e en por de".split()
)  # words after a number that are no unit, but may be before one
POWERS = {
    "hundred": 2, "thousand": 3, "k": 3, "tausend": 3, "mille": 3, "million": 6, "millions": 6, "mio": 6, "millionen": 6, "m": 6,
    "billion": 9, "billions": 9, "bn": 9, "milliarde": 9, "milliarden": 9, "milliard": 9, "milliards": 9, "mrd": 9, "万": 4, "亿": 8,
}  # fmt: skip
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
_MARK = rf"(?:(?<!\w)|(?<=[{CJK}]))"  # before a figure: no letter or digit
_PATTERN = re.compile(
    rf"""(?P<address>(?:https?://|www\.)[^\s<>"'()\[\]{{}}|\\^`]++|[\w.+-]{{1,64}}+@[\w-]{{1,63}}+(?:\.[\w-]{{1,63}}+)++)
    |{_MARK}(?P<ymd>\d{{4}}(?P<sep>[-/.])\d{{1,2}}(?P=sep)\d{{1,2}}(?![\d\w]))
    |{_MARK}(?P<dmy>\d{{1,2}}(?P<of>[-/.])\d{{1,2}}(?P=of)(?:\d{{4}}|\d{{2}})(?![\d\w]))
    |{_MARK}(?P<cjk>\d{{4}}[ ]?年(?:[ ]?\d{{1,2}}[ ]?月(?:[ ]?\d{{1,2}}[ ]?日)?)?|\d{{1,2}}[ ]?月[ ]?\d{{1,2}}[ ]?日)
    |{_MARK}(?P<dm>(?P<d>\d{{1,2}})(?:st|nd|rd|th|er|\.)?[ ]{{1,2}}(?:of[ ]|de[ ])?(?P<m>{_MONTH})\b\.?(?:,?[ ]{{1,2}}(?:de[ ])?(?P<y>\d{{4}})\b)?)
    |{_MARK}(?P<md>(?P<m2>{_MONTH})\b\.?[ ]{{1,2}}(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?(?![\d\w:.]\d|\w)(?:,?[ ]{{1,2}}(?P<y2>\d{{4}})\b)?)
    |{_MARK}(?P<my>(?P<m3>{_MONTH})\b\.?,?[ ]{{1,2}}(?P<y3>\d{{4}})\b)
    |{_MARK}(?P<time>(?P<hour>\d{{1,2}})(?:(?::|h|[ ]h[ ])(?P<minute>\d{{2}})(?::\d{{2}})?(?!\d)(?:[ ]?(?P<half>[ap])(?:\.m\.|m\b))?
        |[ ]?(?P<half2>[ap])(?:\.m\.|m\b)|(?:\.(?P<minute2>\d{{2}}))?(?:[ ]uhr\b|(?=[ ](?:bis|und|-)[ ]\d{{1,2}}(?:\.\d{{2}})?[ ]uhr\b))|[ ]?[点點时時](?:(?P<minute3>\d{{1,2}})分)?))
    |(?P<number>(?:(?:(?<![\w)])|(?<=[{CJK}]))[-+])?(?:(?P<before>[€$£¥])[ ]?)?{_MARK}(?P<digits>\d++(?:[.,']\d++)*+(?:[ ]\d{{3}}(?!\d))*+(?:[.,]\d++)?+)
        (?:st|nd|rd|th)?+(?:-?[ ]?(?P<after>(?:per|pour)[ ]cent|[%€$£¥℃℉万亿]|°[cf]|{_LETTER}{{1,12}}+))?+(?:(?=[ ](?P<more>[%€$£¥]|{_LETTER}{{1,12}}+)))?)
    """,
    re.VERBOSE,
)
_IN_WORDS = re.compile(
    rf"\b(?P<word>(?:{_SMALL})\b(?:[- ](?:and )?(?:{_SMALL})\b)*+)(?:[- ](?P<unit>{_LETTER}{{1,12}}+))?+(?:(?=[ ](?P<more>{_LETTER}{{1,12}}+)))?"
)
_CODE = re.compile(r"(?<!\w)\w++(?:[-_/.:#]\w++)*+")
DIGITS = re.compile(r"\d++")
_HOURS = re.compile(r"\d{1,2}h(?:\d{2})?")  # 11h30
_ADDRESSES = re.compile(r"://|www\.|@")
_BEFORE, _AFTER = 24, 48  # characters around digits that may belong to their figure


def figures(text: str) -> Iterator[Figure]:
    """Yield the figures with digits, and addresses, of a folded text, from left to right."""
    for start, end in _windows(text):
        yield from _figures(text, start, end)


def figures_around(text: str, start: int, end: int) -> Iterator[Figure]:
    """Yield the figures of a folded text that have a part of start:end."""
    found = [*_figures(text, max(0, start - _BEFORE), end + _AFTER), *numbers_in_words(text, start, end + _AFTER)]
    yield from (figure for figure in found if figure.start < end and figure.end > start)


def digits_of(figure: Figure) -> set[str]:
    """Return numbers, without zeros in front, one of which every figure of the same value has: of a number all of its
    digits, in a row or divided; of a date the day or the year; of a time the hour."""
    found = set[str]()
    for value in figure.values:
        if figure.kind == "date":
            year, _, day = value.split("-")
            found.add(day or year)
        elif figure.kind == "time":
            hour = int(value[:-3])
            found |= {str(hour), str(hour % 12), str(hour % 12 + 12)}
        elif figure.kind == "number":
            found.add(value.lstrip("-").replace(".", "").strip("0") or "0")
    return found


def words_of(figure: Figure) -> set[str]:
    """Return the English words for a number below 1,000."""
    if figure.kind != "number":
        return set()
    small = {int(value) for value in figure.values if len(value) < 4 and value.isdigit()}
    return {text for value in small for text in _in_words(value)}


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


def numbers_in_words(text: str, start: int = 0, end: int = sys.maxsize) -> Iterator[Figure]:
    """Yield numbers below 1,000 in English words, of start:end."""
    for found in _IN_WORDS.finditer(text, start, end):
        value = _value_of_words(found["word"])
        if value is not None:
            unit = _unit_behind(found["unit"] or "", found["more"] or "")
            last = found.end("unit") if found["unit"] in _UNITS else found.end("word")
            yield Figure(found.start(), last, "number", frozenset({value}), unit)


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
    after, more = g("after") or "", g("more") or ""
    values = _decimals(g("digits"))
    unit = _UNITS.get(g("before") or "", "") or _unit_behind(after, more)
    if after in POWERS:
        values = (values if after in _UNITS else frozenset()) | {_shifted(value, POWERS[after]) for value in values}
        end = found.end("more" if more in _UNITS else "after")
    elif after in _UNITS:
        end = found.end("after")
    elif after and found.end("digits") == found.start("after"):  # 45B, 12th and the like
        return Figure(found.start("digits"), found.end("after"), "code", frozenset({g("digits") + after}))
    if g()[0] == "-":
        at_line_start = not found.string[max(0, found.start() - 8) : found.start()].rpartition("\n")[2].strip()
        negative = frozenset("-" + value for value in values)
        values = values | negative if at_line_start else negative  # at the start of a line it may mark an item
    return Figure(found.start(), end, "number", values, unit)


def _unit_behind(after: str, more: str) -> str:
    """Return the unit of a number from the words behind it: "" if there is none, OTHER for a unit that is not known."""
    if after in _UNITS and after not in POWERS:
        return _UNITS[after]
    if not after or after in _NO_UNITS:
        return ""
    return _UNITS.get(more, "" if after in POWERS else OTHER)


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


def _in_words(value: int) -> set[str]:
    hundreds, rest = divmod(value, 100)
    tens, ones = divmod(rest, 10) if rest > 19 else (0, rest)
    names = [name for name, number in _TENS.items() if number == 10 * tens > 0]
    names += [name for name, number in _ONES.items() if number == ones and (ones or not value)]
    words = {" ".join(names), "-".join(names)}
    if not hundreds:
        return words
    first = next(name for name, number in _ONES.items() if number == hundreds)
    return (
        {f"{first} hundred{link}{last}" for last in words for link in (" ", " and ")} if rest else {f"{first} hundred"}
    )


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
    hours = {hour % 12 + 12 * (half == "p")} if half else {hour % 24} | ({hour % 12 + 12} if hour <= 12 else set())
    return Figure(*found.span(), "time", frozenset(f"{h % 24}:{minute:02}" for h in hours))


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
