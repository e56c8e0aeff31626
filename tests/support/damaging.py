"""Damaged variants of a file's bytes."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Iterator
from contextlib import suppress


def damaged(data: bytes) -> Iterator[bytes]:
    """Yield the bytes cut short, with other bytes in places, and for archives with parts emptied, cut or renamed."""
    chance = random.Random(0)
    yield from (data[: len(data) * share // 10] for share in (1, 5, 9))
    for _ in range(3):
        changed = bytearray(data)
        for _ in range(20):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        yield bytes(changed)
    with suppress(zipfile.BadZipFile):
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
        for name in names[:: max(1, len(names) // 12)]:
            for part in (b"", b"<a><b>", b"<x:y/>", b"<a xmlns='urn:b'/>", b"\xff\xfe\0"):
                yield _with_part(data, name, part)
        yield _with_part(data, names[0], None)


def _with_part(data: bytes, name: str, part: bytes | None) -> bytes:
    """Return the archive with another content of a part; None: under another name."""
    out, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(data))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for info in source.infolist():
            content = source.read(info)
            if info.filename != name:
                archive.writestr(info.filename, content)
            else:
                archive.writestr(f"{name}.bak" if part is None else name, content if part is None else part)
    return out.getvalue()
