"""Fields of a Word document, such as page numbers, and its form fields.

A field consists of runs: a begin mark, its code, a separator, its result (text as shown), and an end mark. Fields can
be within the code or the result of other fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from cacheblend_documents.inline_marks import target_of
from cacheblend_documents.office.package import child, integer
from cacheblend_documents.word.styles import is_on, value_of

_CODE = 400  # characters of a field's code to keep
_HYPERLINK = re.compile(r"""\s*HYPERLINK\s+(?:"([^"]*)"|(\S+))""", re.IGNORECASE)
_PAGE_FIELDS = frozenset(("PAGE", "NUMPAGES", "SECTIONPAGES", "SECTION"))
CHECKED, UNCHECKED = "\u2612", "\u2610"


def hyperlink(code: str) -> str:
    """Return the target of a HYPERLINK field, "" for other fields and for places in the document."""
    found = _HYPERLINK.match(code)
    return target_of(found[1] or found[2] or "") if found else ""


@dataclass
class _Field:
    code: str = ""  # its first characters
    has_result: bool = False

    @property
    def name(self) -> str:
        return (self.code.split() or [""])[0].upper()


class Fields:
    """Open fields, outermost first."""

    def __init__(self) -> None:
        self._open: list[_Field] = []
        self._num_codes = 0  # fields before their separator

    def begin(self, code: str = "", *, has_result: bool = False) -> None:
        self._open.append(_Field(code[:_CODE], has_result))
        self._num_codes += not has_result

    def separate(self) -> None:
        if self._open:
            self._num_codes -= not self._open[-1].has_result
            self._open[-1].has_result = True

    def end(self) -> str:
        """Close a field. Return its name if it has no result, else ""."""
        if not self._open:
            return ""
        ended = self._open.pop()
        self._num_codes -= not ended.has_result
        return "" if ended.has_result else ended.name

    @property
    def link(self) -> str:
        """Target of the innermost field, "" if it is not a link."""
        return hyperlink(self._open[-1].code) if self._open and self._open[-1].has_result else ""

    def add_code(self, text: str) -> None:
        if self._open and not self._open[-1].has_result:
            self._open[-1].code = (self._open[-1].code + text)[:_CODE]

    def begin_paragraph(self) -> None:
        """Close fields whose code does not end with its paragraph: they are damaged."""
        if self._num_codes:
            self._open, self._num_codes = [], 0

    @property
    def is_code(self) -> bool:
        """Return whether text here is a result of a field within the code of another one."""
        return bool(self._open) and self._num_codes > (not self._open[-1].has_result)

    @property
    def is_page_number(self) -> bool:
        return any(field.has_result and field.name in _PAGE_FIELDS for field in self._open[-3:])


def form_value(element: Element) -> str:
    """Return the state of a check box or drop-down list (w:ffData). A text field's value is the field's result."""
    box, choice = child(element, "w:checkBox"), child(element, "w:ddList")
    if box is not None:
        checked = is_on(box, "w:checked")
        return CHECKED if (is_on(box, "w:default") if checked is None else checked) else UNCHECKED
    entries = [] if choice is None else [entry.get("val", "") for entry in choice.findall("w:listEntry")]
    chosen = integer(value_of(choice, "w:result") or value_of(choice, "w:default"))
    return entries[chosen] if 0 <= chosen < len(entries) else ""
