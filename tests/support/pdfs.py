"""PDFs of pages with given content, fonts and annotations."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

HELVETICA = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
UNMAPPED = (
    b"<< /Type /Font /Subtype /Type0 /BaseFont /X /Encoding /Identity-H /DescendantFonts [<< /Type /Font "
    b"/Subtype /CIDFontType2 /BaseFont /X /CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> "
    b"/FontDescriptor << /Type /FontDescriptor /FontName /X /Flags 4 /FontBBox [0 -200 1000 800] /ItalicAngle 0 "
    b"/Ascent 800 /Descent -200 /CapHeight 700 /StemV 80 >> >>] >>"
)
"""A font of glyph numbers that says nothing about their characters."""


def drawn_font(characters: Mapping[bytes, str]) -> dict[str, Any]:
    """Return the arguments of `pages` for a font of equal boxes, half as wide as high. characters: by code, in hex."""
    names = b" ".join(b"/c%s" % code for code in characters)
    first = min(int(code, 16) for code in characters)
    pairs = b" ".join(b"<%s> <%s>" % (code, c.encode("utf-16-be").hex().encode()) for code, c in characters.items())
    to_unicode = (
        b"/CIDInit /ProcSet findresource begin begincmap 1 begincodespacerange <00> <FF> endcodespacerange "
        b"%d beginbfchar %s endbfchar endcmap end" % (len(characters), pairs)
    )
    font = (
        b"<< /Type /Font /Subtype /Type3 /FontBBox [0 0 500 700] /FontMatrix [.001 0 0 .001 0 0] /FirstChar %d " % first
    )
    font += b"/LastChar %d /Widths [%s] " % (first + len(characters) - 1, b"500 " * len(characters))
    font += b"/Encoding << /Differences [%d %s] >> /ToUnicode 3 0 R " % (first, names)
    font += b"/CharProcs << %s >> >>" % b" ".join(b"/c%s 4 0 R" % code for code in characters)
    return {"font": font, "more": [stream(to_unicode), stream(b"500 0 0 0 500 700 d1 0 0 500 700 re f")]}


def assembled(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Return a PDF of these objects; the first one is the catalog."""
    out, places = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, trailer, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (len(objects) + 1, table, end)


def stream(content: bytes, entries: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), entries, content)


def pages(
    *contents: bytes | str,
    annotations: Sequence[bytes] = (),
    font: bytes = HELVETICA,
    turned: int = 0,
    more: Sequence[bytes] = (),
) -> bytes:
    """Return a PDF with a page for each content stream, and all annotations on the first one.

    more: objects from number 3 on, after those of the annotations.
    The fonts are F1 (Helvetica) and F2 (`font`). A widget among the annotations is a field of the document's form.
    """
    first = 3 + len(annotations) + len(more)  # number of the first page's object
    kids = b" ".join(b"%d 0 R" % (first + 2 * n) for n in range(len(contents)))
    marks = b" ".join(b"%d 0 R" % (3 + n) for n in range(len(annotations)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [%s] >> >>" % marks,
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        *annotations,
        *more,
    ]
    for n, content in enumerate(contents):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Rotate %d /Contents %d 0 R "
            b"/Resources << /Font << /F1 %s /F2 %s >> >> /Annots [%s] >>"
            % (turned, first + 2 * n + 1, HELVETICA, font, b"" if n else marks)
        )
        objects.append(stream(content.encode("latin-1") if isinstance(content, str) else content))
    return assembled(objects)


def text_at(x: float, y: float, text: str, font: str = "/F1 12 Tf") -> str:
    """Content that shows a line of text."""
    return f"BT {font} 1 0 0 1 {x} {y} Tm ({text}) Tj ET\n"


def lines_at(*lines: tuple[float, float, str]) -> str:
    return "".join(text_at(*line) for line in lines)


def side_by_side(*rows: Sequence[str], width: float = 200, top: float = 700) -> str:
    """Content that draws rows of cells, one row after the other. width: of a column."""
    places = (
        (72 + width * column, top - 14 * n, cell) for n, row in enumerate(rows) for column, cell in enumerate(row)
    )
    return lines_at(*places)


def widget(kind: str, name: str, value: str, box: tuple[float, float, float, float], more: str = "") -> bytes:
    """A form field: kind /Tx for text, /Btn for a check box, /Ch for a choice."""
    place = " ".join(map(str, box))
    return f"<< /Type /Annot /Subtype /Widget /FT {kind} /T ({name}) /V {value} /Rect [{place}] /F 4 {more} >>".encode()


_PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


def encrypted(text: str, password: str) -> bytes:
    """Return a PDF of one page that this password opens, by the standard handler of revision 2 (RC4, 40 bits)."""
    user = (password.encode() + _PADDING)[:32]
    owner = _rc4(hashlib.md5(b"owner".ljust(32, b"x")).digest()[:5], user)
    key = hashlib.md5(user + owner + (-4 & 0xFFFFFFFF).to_bytes(4, "little") + b"id").digest()[:5]
    handler = b"<< /Filter /Standard /V 1 /R 2 /O <%s> /U <%s> /P -4 >>"
    page = text_at(72, 700, text).encode("latin-1")
    secret = _rc4(hashlib.md5(key + (4).to_bytes(3, "little") + b"\0\0").digest()[:10], page)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 %s >> >> >>"
        % HELVETICA,
        stream(secret),
        handler % (owner.hex().encode(), _rc4(key, _PADDING).hex().encode()),
    ]
    return assembled(objects, b"/Encrypt 5 0 R /ID [(id) (id)]")


def _rc4(key: bytes, data: bytes) -> bytes:
    state, j = list(range(256)), 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)
