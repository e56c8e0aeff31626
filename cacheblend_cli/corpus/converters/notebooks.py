"""Jupyter notebooks: text and code cells, without their outputs. Formats 3 and 4 of nbformat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cacheblend_cli.corpus.converters.converter import NoDocument, decoded, joined
from cacheblend_cli.corpus.layout import Converted, Mark

_OLDEST = 3  # oldest format with worksheets


def from_notebook(data: bytes) -> Converted:
    try:
        return joined(_cells(json.loads(decoded(data))), "markdown")
    except RecursionError as error:
        raise NoDocument("is nested too deeply", "broken notebooks") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoDocument("not a notebook", "broken notebooks") from error


def _cells(notebook: Any) -> Iterator[tuple[str, Mark]]:
    version = notebook.get("nbformat", 4)
    if version < _OLDEST:
        raise NoDocument(f"a notebook of format {version}: convert it with jupyter nbconvert", "old notebooks")
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    cells = notebook["cells"] if "cells" in notebook else [c for s in notebook["worksheets"] for c in s["cells"]]
    for number, cell in enumerate(cells, 1):
        source = cell["source"] if "source" in cell else cell["input"]  # "input": code of format 3
        text = (source if isinstance(source, str) else "".join(source)).strip("\n")
        if cell["cell_type"] == "code" and text:
            text = f"```{cell.get('language', language)}\n{text}\n```"
        elif cell["cell_type"] == "heading":
            text = f"{'#' * min(max(int(cell.get('level', 1)), 1), 6)} {' '.join(text.split())}"
        yield text, Mark(0, f"cell {number}")
