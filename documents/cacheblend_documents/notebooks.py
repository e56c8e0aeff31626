"""Jupyter notebooks: text and code cells, without their outputs. Formats 3 and 4 of nbformat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cacheblend_documents.converted import Converted, Mark, NotConverted, joined
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import decoded

_OLDEST = 3  # oldest format with worksheets


def from_notebook(data: bytes) -> Converted:
    omissions = Omissions()
    try:
        return joined(_cells(json.loads(decoded(data)), omissions), "markdown", omissions=omissions)
    except RecursionError as error:
        raise NotConverted("is nested too deeply", "broken notebooks") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotConverted("not a notebook", "broken notebooks") from error


def _cells(notebook: Any, omissions: Omissions) -> Iterator[tuple[str, Mark]]:
    version = notebook.get("nbformat", 4)
    if version < _OLDEST:
        raise NotConverted(f"a notebook of format {version}: convert it with jupyter nbconvert", "old notebooks")
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    cells = notebook["cells"] if "cells" in notebook else [c for s in notebook["worksheets"] for c in s["cells"]]
    for number, cell in enumerate(cells, 1):
        try:
            yield _cell_text(cell, language), Mark(0, f"cell {number}")
        except (ValueError, KeyError, TypeError, AttributeError):
            omissions.add("cell cannot be read", f"cell {number}", plural="cells cannot be read")


def _cell_text(cell: Any, language: str) -> str:
    source = cell["source"] if "source" in cell else cell["input"]  # "input": code of format 3
    text = (source if isinstance(source, str) else "".join(source)).strip("\n")
    if cell["cell_type"] == "code" and text:
        return f"```{cell.get('language', language)}\n{text}\n```"
    if cell["cell_type"] == "heading":
        return f"{'#' * min(max(int(cell.get('level', 1)), 1), 6)} {' '.join(text.split())}"
    return text
