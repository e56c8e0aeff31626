"""List numbers of a Word document: "1.", "(b)", "2.3". Word stores definitions and counts when it shows the text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from cacheblend_documents.numerals import repeated_letter, roman
from cacheblend_documents.office.package import child, integer
from cacheblend_documents.symbols import MARKS, without_font_codes
from cacheblend_documents.word.styles import Style, Styles, is_on, value_of

_LEVELS = 9
_LONGEST = 60  # maximum characters of a number's form
_LARGEST = 1 << 31
_PLACE = re.compile("%([1-9])")


@dataclass(frozen=True)
class Label:
    """Number or bullet of a paragraph."""

    text: str
    level: int  # from 0


@dataclass(frozen=True)
class _Level:
    start: int = 1
    form: str = "decimal"
    text: str = "%1."
    style: str = ""  # paragraph style of this level
    restart: int | None = None  # restarts after levels below this one; None stands for its own
    is_legal: bool = False  # all numbers are decimal

    @classmethod
    def of(cls, element: Element) -> _Level:
        fonts, restart = child(element, "w:rPr", "w:rFonts"), value_of(element, "w:lvlRestart")
        font = "" if fonts is None else fonts.get("ascii", "")
        text = without_font_codes(value_of(element, "w:lvlText")[:_LONGEST], font)
        start, form = _bounded(value_of(element, "w:start")), value_of(element, "w:numFmt") or "decimal"
        style, is_legal = value_of(element, "w:pStyle"), bool(is_on(element, "w:isLgl"))
        return cls(start, form, text, style, integer(restart) if restart else None, is_legal)


@dataclass
class _List:
    """A list: its levels, and counters that it shares with the lists of the same definition."""

    levels: dict[int, _Level]
    counters: list[int | None]
    starts: dict[int, int]  # level -> where this list starts once


@dataclass
class _Definition:
    levels: dict[int, _Level]
    link: str  # numbering style that has the levels
    counters: list[int | None] = field(default_factory=lambda: [None] * _LEVELS)


class Numbering:
    """Numbers of the paragraphs of a document. Call `next` in document order."""

    def __init__(self, root: Element | None, styles: Styles) -> None:
        """root: w:numbering; None if the document has none."""
        self._styles = styles
        self._definitions: dict[str, _Definition] = {}
        self._elements: dict[str, Element] = {}
        self._lists: dict[str, _List | None] = {}
        if root is not None:
            for element in root.findall("w:abstractNum"):
                definition = _Definition(_levels(element), value_of(element, "w:numStyleLink"))
                self._definitions[element.get("abstractNumId", "")] = definition
            self._elements = {element.get("numId", ""): element for element in root.findall("w:num")}

    def next(self, properties: Element | None, style: Style) -> Label | None:
        """Count a paragraph and return its number, None outside of lists. properties: its w:pPr."""
        num_id, level = value_of(properties, "w:numPr", "w:numId"), value_of(properties, "w:numPr", "w:ilvl")
        listed = self._list(num_id or style.num_id)
        if listed is None:
            return None
        if level:
            number = integer(level)
        else:
            linked = (n for n, one in listed.levels.items() if one.style == style.num_style and not num_id)
            number = next(linked, style.num_level or 0) if style.num_style else 0
        return _counted(listed, min(max(number, 0), _LEVELS - 1))

    def _list(self, num_id: str) -> _List | None:
        if num_id not in self._lists:
            element = self._elements.get(num_id)
            definition = None if element is None else self._definition(element)
            found = None
            if element is not None and definition is not None:
                found = _List(dict(definition.levels), definition.counters, {})
                for override in element.findall("w:lvlOverride"):
                    level, start = integer(override.get("ilvl")), value_of(override, "w:startOverride")
                    if (own := child(override, "w:lvl")) is not None and level in range(_LEVELS):
                        found.levels[level] = _Level.of(own)
                    if start:
                        found.starts[level] = _bounded(start)
            self._lists[num_id] = found
        return self._lists[num_id]

    def _definition(self, element: Element) -> _Definition | None:
        definition = self._definitions.get(value_of(element, "w:abstractNumId"))
        if definition is not None and definition.link:
            linked = self._elements.get(self._styles.of(definition.link).num_id)
            return self._definitions.get(value_of(linked, "w:abstractNumId"), definition)
        return definition


def _levels(definition: Element) -> dict[int, _Level]:
    levels = ((integer(element.get("ilvl")), element) for element in definition.findall("w:lvl"))
    return {number: _Level.of(element) for number, element in levels if number in range(_LEVELS)}


def _bounded(text: str) -> int:
    return min(max(integer(text), 0), _LARGEST)


def _counted(listed: _List, number: int) -> Label | None:
    counters, levels = listed.counters, listed.levels
    level, before = levels.get(number, _Level(text=f"%{number + 1}.")), counters[number]
    start = listed.starts.pop(number, None)
    counters[number] = start if start is not None else level.start if before is None else before + 1
    for deeper in range(number + 1, _LEVELS):
        restart = levels[deeper].restart if deeper in levels else None
        if restart is None or number < restart:
            counters[deeper] = None
    if level.form == "bullet":
        return Label(f"- {level.text}" if level.text in MARKS else "-", number)

    def shown(place: re.Match[str]) -> str:
        upper = int(place[1]) - 1
        known, count = levels.get(upper, _Level()), counters[upper]
        form = "decimal" if level.is_legal and known.form != "none" else known.form
        return formatted(known.start if count is None else count, form)

    text = " ".join(_PLACE.sub(shown, level.text).split())
    return Label(text, number) if text else None


_CHINESE = frozenset(
    "chineseCounting chineseCountingThousand chineseLegalSimplified taiwaneseCounting taiwaneseCountingThousand japaneseCounting "
    "japaneseDigitalTenThousand ideographDigital ideographLegalTraditional koreanCounting".split()
)
_IN_ORDER = {
    "russianLower": "абвгдежзиклмнопрстуфхцчшщыэюя",
    "russianUpper": "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЩЫЭЮЯ",
    "hebrew2": "אבגדהוזחטיכלמנסעפצקרשת",
    "arabicAlpha": "أبتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "aiueo": "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワヲン",
    "ganada": "가나다라마바사아자차카타파하",
    "ideographTraditional": "甲乙丙丁戊己庚辛壬癸",
    "decimalEnclosedCircle": "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳",
    "decimalEnclosedCircleChinese": "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳",
}


def formatted(number: int, form: str) -> str:
    """Write a number in a form of Word: "lowerRoman". Unknown forms and large numbers are decimal."""
    kind = form.removeprefix("lower").removeprefix("upper")
    text = str(number)
    if form == "none":
        return ""
    if form == "decimalZero":
        return text.zfill(2)
    if form == "ordinal":
        last = 0 if number % 100 // 10 == 1 else number % 10
        return text + {1: "st", 2: "nd", 3: "rd"}.get(last, "th")
    if kind == "Letter":
        text = repeated_letter(number)
    elif kind == "Roman":
        text = roman(number)
    elif form in _CHINESE and 0 < number < 10_000:
        return _chinese(number)
    elif (letters := _IN_ORDER.get(form, "")) and 0 < number <= len(letters):
        return letters[number - 1]
    return text.upper() if form.startswith("upper") else text


_DIGITS = "〇一二三四五六七八九"


def _chinese(number: int) -> str:
    text = ""
    for value, unit in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit, number = divmod(number, value)
        if digit:
            text += _DIGITS[digit] + unit
        elif text and number and text[-1] != _DIGITS[0]:
            text += _DIGITS[0]
    return text.removeprefix("一") if text.startswith("一十") else text
