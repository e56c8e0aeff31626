"""Form values and comments of a PDF page.

A value goes to its label: the text to the left of the field on the same line, or else right above it; to the right of a
check box. Fields without a label are put at the end of the page with their names.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pypdfium2 import PdfDocument, PdfPage, raw

from cacheblend_documents.pdf.lines import Box, Piece, Row, turned

_MOST = 5_000  # annotations of a page to read
_MOST_BYTES = 1 << 20  # of a value
_NEAR = 50  # pieces beside a field to choose its label from
_REACH = 20  # farthest label, in heights of its text
_SLACK = 2  # points by which a label may overlap its field


@dataclass(frozen=True, slots=True)
class _Field:
    """Value of a form field, or text typed onto a page."""

    name: str
    value: str
    box: Box
    checked: bool | None = None  # None unless it is a check box or radio button


@dataclass(slots=True)
class Annotations:
    """Annotations of a page with text."""

    fields: list[_Field] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    num_left: int = 0  # annotations beyond the limit

    def fill(self, lines: list[Row]) -> None:
        """Add the values to the lines of the page."""
        labels = sorted((piece for line in lines for piece in line), key=_middle)
        middles = list(map(_middle, labels))
        for field_ in sorted(self.fields, key=lambda f: (-f.box[3], f.box[0])):
            left, bottom, right, top = field_.box
            first, last = bisect_left(middles, bottom), bisect_right(middles, top + 1.5 * (top - bottom))
            near = labels[first : min(last, first + _NEAR)]
            label, is_before = _label(field_, near)
            if label is None:
                named = f"{field_.name}: {field_.value}" if field_.name else field_.value
                lines.append([Piece(named, left, bottom, right, top)])
            elif is_before:
                label.text += f" {field_.value}"
                label.right = max(label.right, right)
            else:
                label.text = f"[{'x' if field_.checked else ' '}] {label.text}"


def _middle(piece: Piece) -> float:
    return (piece.bottom + piece.top) / 2


def _label(field_: _Field, near: list[Piece]) -> tuple[Piece | None, bool]:
    """Return the label of a field, and whether the value goes after it."""
    left, _, right, top = field_.box
    found: list[tuple[float, bool, Piece]] = []
    for piece in near:
        reach = _REACH * piece.height
        if _middle(piece) > top:
            is_above = piece.bottom - top <= piece.height and piece.left < right and piece.right > left
            if is_above and field_.checked is None:
                found.append((reach + piece.bottom - top, True, piece))
        elif 0 <= left - piece.right + _SLACK <= reach:
            found.append((left - piece.right, True, piece))
        elif field_.checked is not None and 0 <= piece.left - right + _SLACK <= reach:
            found.append((piece.left - right, False, piece))
    _, is_before, label = min(found, key=lambda f: f[0], default=(0, False, None))
    return label, is_before


def annotations_of(document: PdfDocument, page: PdfPage) -> Annotations:
    """Read the annotations of a page. The document's form is initialised, if it has one."""
    found = Annotations()
    count = raw.FPDFPage_GetAnnotCount(page.raw)
    found.num_left = max(0, count - _MOST)
    form = document.formenv.raw if document.formenv is not None else None
    for index in range(min(count, _MOST)):
        annotation = raw.FPDFPage_GetAnnot(page.raw, index)
        if not annotation:
            continue
        hidden = raw.FPDFAnnot_GetFlags(annotation) & (raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW)
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        if hidden:
            pass
        elif kind == raw.FPDF_ANNOT_WIDGET:
            if form is not None:
                found.fields.extend(_widget(form, annotation, page))
        elif kind not in (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP):
            text = _text(raw.FPDFAnnot_GetStringValue, annotation, b"Contents")
            if kind == raw.FPDF_ANNOT_FREETEXT and text:
                found.fields.append(_Field("", text, _box(annotation, page)))
            elif text:
                author = _text(raw.FPDFAnnot_GetStringValue, annotation, b"T")
                found.comments.append(f"Comment{author and f' by {author}'}: {text}")
        raw.FPDFPage_CloseAnnot(annotation)
    return found


def _widget(form: Any, annotation: Any, page: PdfPage) -> Iterator[_Field]:
    """Yield the field of a widget, if it has a value."""
    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    box = _box(annotation, page)
    name = _text(raw.FPDFAnnot_GetFormFieldAlternateName, form, annotation)
    name = name or _text(raw.FPDFAnnot_GetFormFieldName, form, annotation)
    if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
        checked = bool(raw.FPDFAnnot_IsChecked(form, annotation))
        yield _Field(name, "yes" if checked else "no", box, checked)
    elif kind in (raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX):
        is_password = raw.FPDFAnnot_GetFormFieldFlags(form, annotation) & raw.FPDF_FORMFLAG_TEXT_PASSWORD
        value = _text(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
        if value and not (is_password and kind == raw.FPDF_FORMFIELD_TEXTFIELD):
            yield _Field(name, value, box)


def _box(annotation: Any, page: PdfPage) -> Box:
    place = raw.FS_RECTF()
    raw.FPDFAnnot_GetRect(annotation, ctypes.byref(place))
    left, right = sorted((place.left, place.right))
    bottom, top = sorted((place.bottom, place.top))
    return turned([(left, bottom, right, top)], page.get_rotation())[0]


def _text(read: Callable[..., int], *arguments: Any) -> str:
    """Return a text in one line, by a function of PDFium that fills a buffer."""
    size = min(read(*arguments, None, 0), _MOST_BYTES)
    buffer = ctypes.create_string_buffer(max(size, 2))
    read(*arguments, ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR)), size)
    return " ".join(buffer.raw[:size].decode("utf-16-le", "replace").replace("\0", "").split())
