"""Binary Excel workbooks (.xlsb) with one sheet."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from files import packed

DATE = 1
"""Style of dates; 0 is that of numbers."""


def whole(number: int, style: int = 0) -> tuple[int, bytes]:
    """Return a cell's kind and content: a whole number in four bytes."""
    return 2, struct.pack("<Ii", style, number << 2 | 2)


def floating(number: float, style: int = 0) -> tuple[int, bytes]:
    return 5, struct.pack("<Id", style, number)


def text(value: str) -> tuple[int, bytes]:
    return 6, struct.pack("<I", 0) + _string(value)


def xlsb(*rows: Iterable[tuple[int, bytes]]) -> bytes:
    book = _record(0x99, bytes(12) + _string("")) + _record(
        0x9C, struct.pack("<II", 0, 1) + _string("r1") + _string("S")
    )
    formats = b"".join(_record(0x2F, struct.pack("<HH", 0, number) + bytes(12)) for number in (0, 14))
    sheet = _record(0x94, struct.pack("<IIII", 0, len(rows), 0, 9)) + _record(0x91)
    for number, cells in enumerate(rows):
        sheet += _record(0, struct.pack("<I", number) + bytes(13))
        sheet += b"".join(_record(kind, struct.pack("<I", column) + cell) for column, (kind, cell) in enumerate(cells))
    return packed(
        {
            "xl/workbook.bin": book + _record(0x90) + _record(0x84),
            "xl/_rels/workbook.bin.rels": b'<Relationships><Relationship Id="r1" Target="worksheets/sheet1.bin"/></Relationships>',
            "xl/styles.bin": _record(0x269, struct.pack("<I", 2)) + formats,
            "xl/worksheets/sheet1.bin": sheet + _record(0x92),
        }
    )


def _string(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode("utf-16-le")


def _record(kind: int, content: bytes = b"") -> bytes:
    return _number(kind) + _number(len(content)) + content


def _number(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80, value >> 7])
