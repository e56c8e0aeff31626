"""Binary Excel workbooks: whole numbers as calamine reads them.

Of the numbers that a cell can hold (MS-XLSB 2.5.123), calamine takes whole numbers for numbers even if the cell's
format is that of a date. As floating-point numbers of the same four bytes, they are dates.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from contextlib import suppress

_CELL_RK = 2  # kind of record: a cell with a number of four bytes
_VALUE = 8  # start of the number, after the column and the style
_SIZE = 12


def with_floats(data: bytes) -> bytes:
    """Return a binary workbook with whole numbers as floating-point numbers, where they fit, and other files unchanged.

    Parts that cannot be unpacked are left out.
    """
    if not data.startswith(b"PK"):
        return data
    archive, out = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    if "xl/workbook.bin" not in archive.namelist():
        return data
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as changed:
        for name in filter(lambda name: name.endswith((".bin", ".rels")), archive.namelist()):
            with suppress(zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError):
                part = archive.read(name)
                changed.writestr(name, _sheet_with_floats(part) if name.startswith("xl/worksheets/") else part)
    return out.getvalue()


def _sheet_with_floats(data: bytes) -> bytes:
    changed, at = bytearray(data), 0
    while at < len(data):
        kind, at = _number(data, at, 2)
        size, at = _number(data, at, 4)
        value = at + _VALUE
        if kind == _CELL_RK and size >= _SIZE and value + 4 <= len(data) and data[value] & 3 == 2:  # whole, not / 100
            number = int.from_bytes(data[value : value + 4], "little", signed=True) >> 2
            low, high = struct.unpack("<II", struct.pack("<d", number))
            if not low and not high & 3:
                changed[value : value + 4] = high.to_bytes(4, "little")
        at += size
    return bytes(changed)


def _number(data: bytes, at: int, most: int) -> tuple[int, int]:
    """Return a number of up to `most` bytes with 7 bits each, and the place after it."""
    number = 0
    for shift in range(0, 7 * most, 7):
        byte = data[at] if at < len(data) else 0
        number, at = number | (byte & 0x7F) << shift, at + 1
        if not byte & 0x80:
            break
    return number, at
