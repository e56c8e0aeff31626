"""PowerPoint, through python-pptx: the text, tables and notes of each slide."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from cacheblend_cli.corpus.converters.converter import joined, needs
from cacheblend_cli.corpus.converters.office import opened
from cacheblend_cli.corpus.layout import Converted, Mark
from cacheblend_cli.corpus.no_document import NoDocument


class PptxConverter:
    suffixes = (".pptx",)

    def convert(self, data: bytes) -> Converted:
        try:
            from pptx import Presentation
        except ImportError:
            raise needs("python-pptx") from None
        opened(data, "a presentation")
        try:
            slides = Presentation(io.BytesIO(data)).slides
            parts = [("\n\n".join(_slide(slide)), Mark(0, f"slide {n}")) for n, slide in enumerate(slides, 1)]
        except Exception as error:  # of whatever its parser trips over
            raise NoDocument(f"not a presentation: {error}"[:120], "damaged or locked") from error
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
        for inner in getattr(shape, "shapes", ()):  # of a group
            yield from _shape(inner)
