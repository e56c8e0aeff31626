"""Files that are ZIP archives: Word, PowerPoint and Excel, read with mammoth, python-pptx and openpyxl, and EPUB. Their
unpacked size is limited."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from cacheblend_cli.corpus.converters.converter import NoDocument, joined, parsing
from cacheblend_cli.corpus.converters.html import html_text
from cacheblend_cli.corpus.converters.tables import row_text
from cacheblend_cli.corpus.layout import Converted, Mark

_MOST = 512 << 20  # maximum unpacked bytes
_MOST_ROWS = 1 << 20  # maximum rows of an Excel sheet


def opened(data: bytes, what: str) -> zipfile.ZipFile:
    """Open the archive. Raises NoDocument if it is not a ZIP archive or is too large unpacked."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise NoDocument(f"not {what}, or with a password", "damaged or locked") from error
    if sum(entry.file_size for entry in archive.infolist()) > _MOST:
        raise NoDocument(f"unpacks to more than {_MOST >> 20} MiB", "too large unpacked")
    return archive


def from_docx(data: bytes) -> Converted:
    """Convert headings, lists, tables and text, without pictures. A .docx has no page breaks."""
    with parsing("mammoth", what := "a Word document"):
        import mammoth

        opened(data, what)
        html = mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda image: []).value
    return html_text(f"<body>{html}</body>")


def from_pptx(data: bytes) -> Converted:
    """Convert the text, tables and notes of each slide."""
    with parsing("python-pptx", what := "a presentation"):
        from pptx import Presentation

        opened(data, what)
        slides = Presentation(io.BytesIO(data)).slides
        parts = [("\n\n".join(_slide(slide)), Mark(0, f"slide {n}")) for n, slide in enumerate(slides, 1)]
    return joined(parts, "markdown")


def _slide(slide: Any) -> Iterator[str]:
    title = slide.shapes.title
    if title is not None and title.text_frame.text.strip():
        yield "# " + " ".join(title.text_frame.text.split())
    for shape in slide.shapes:
        if title is None or shape.shape_id != title.shape_id:
            yield from _shape(shape)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        notes = slide.notes_slide.notes_text_frame.text.strip()
        yield f"Notes: {notes}" if notes else ""


def _shape(shape: Any) -> Iterator[str]:
    if shape.has_text_frame:
        yield "\n".join(text for p in shape.text_frame.paragraphs if (text := p.text.replace("\v", "\n").strip()))
    elif getattr(shape, "has_table", False) and shape.has_table:
        yield "\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in shape.table.rows)
    else:
        for inner in getattr(shape, "shapes", ()):  # shapes of a group
            yield from _shape(inner)


def from_xlsx(data: bytes) -> Converted:
    """Convert each row of each sheet to one line. Formulas have the values that were saved with the file."""
    with parsing("openpyxl", what := "a workbook"):
        from openpyxl import load_workbook

        opened(data, what)
        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        parts = [(f"# {s.title}\n\n" + "\n".join(_rows(s)), Mark(0, f"sheet {s.title}")) for s in book.worksheets]
    return joined(parts, "markdown")


def _rows(sheet: Any) -> Iterator[str]:
    names: list[str] | None = None
    for number, values in enumerate(sheet.iter_rows(values_only=True), 1):
        if number > _MOST_ROWS:  # the count includes rows missing in the file
            raise NoDocument(f"a sheet has more than {_MOST_ROWS:,} rows", "damaged or locked")
        row = ["" if value is None else str(value) for value in values]
        if any(cell.strip() for cell in row):
            if names is None:
                names = [" ".join(cell.split()) for cell in row]
                yield ", ".join(filter(None, names))
            else:
                yield row_text(names, row)


_CONTAINER = "META-INF/container.xml"


def from_epub(data: bytes) -> Converted:
    with parsing("defusedxml", what := "a book"):
        from defusedxml.ElementTree import fromstring

        return joined(list(_chapters(opened(data, what), fromstring)), "markdown")


def _chapters(archive: zipfile.ZipFile, fromstring: Callable[[bytes], Any]) -> Iterator[tuple[str, Mark]]:
    root = fromstring(archive.read(_CONTAINER)).find(".//{*}rootfile").get("full-path")
    package = fromstring(archive.read(root))
    files = {item.get("id"): item.get("href") for item in package.findall(".//{*}item")}
    folder, number = posixpath.dirname(root), 0
    for reference in dict.fromkeys(item.get("idref") for item in package.findall(".//{*}itemref")):
        name = posixpath.normpath(posixpath.join(folder, unquote(files[reference])))
        try:
            text = html_text(archive.read(name).decode("utf-8", "replace")).text
        except NoDocument:
            continue
        if text.strip():
            number += 1
            yield text, Mark(0, f"chapter {number}")
