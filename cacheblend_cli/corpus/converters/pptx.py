"""Presentations, read with python-pptx."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from cacheblend_cli.corpus.converters.archive import opened
from cacheblend_cli.corpus.converters.converter import joined, parsing
from cacheblend_cli.corpus.layout import Converted, Mark


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
