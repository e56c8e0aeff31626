"""Jupyter notebooks: text and code cells, without their outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cacheblend_cli.corpus.converters.converter import NoDocument, decoded, joined
from cacheblend_cli.corpus.layout import Converted, Mark


def from_notebook(data: bytes) -> Converted:
    try:
        cells = list(_cells(json.loads(decoded(data))))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise NoDocument("not a notebook", "broken notebooks") from error
    return joined(cells, "markdown")


def _cells(notebook: Any) -> Iterator[tuple[str, Mark]]:
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    for number, cell in enumerate(notebook["cells"], 1):
        source = cell["source"]
        text = (source if isinstance(source, str) else "".join(source)).strip("\n")
        if cell["cell_type"] == "code" and text:
            text = f"```{language}\n{text}\n```"
        yield text, Mark(0, f"cell {number}")
