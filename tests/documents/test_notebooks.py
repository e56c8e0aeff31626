"""Notebooks of formats 3 and 4."""

from __future__ import annotations

import json
from typing import Any

import files
import pytest
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.notebooks import from_notebook

from cacheblend_cli.corpus.cutting import Locating


def test_notebooks_are_their_cells_without_outputs() -> None:
    found = from_notebook(files.notebook())
    assert found.text == "# Study\n\nWhy.\n\n```python\nx = 1\n```\n\n"
    start = found.text.index("x = 1")
    place = Locating(found).find(start, start + 5)
    assert (place.text, place.headings) == ("cell 2", ("Study",))


def test_the_worksheets_of_format_3_are_read() -> None:
    cells: list[dict[str, Any]] = [
        {"cell_type": "heading", "level": 2, "source": ["Door\n", "code"]},
        {"cell_type": "markdown", "source": ["The code is 4417."]},
        {"cell_type": "code", "input": ["print(4417)"], "language": "ruby", "outputs": []},
    ]
    notebook = {"nbformat": 3, "worksheets": [{"cells": cells[:2]}, {"cells": cells[2:]}]}
    assert from_notebook(json.dumps(notebook).encode()).text == (
        "## Door code\n\nThe code is 4417.\n\n```ruby\nprint(4417)\n```\n\n"
    )


def test_older_formats_are_refused_by_name() -> None:
    with pytest.raises(NotConverted, match="a notebook of format 2") as refused:
        from_notebook(b'{"nbformat": 2, "cells": []}')
    assert refused.value.group == "old notebooks"


def test_a_broken_cell_loses_only_that_cell() -> None:
    cells = [
        {"cell_type": "markdown", "source": "one"},
        {"cell_type": "code"},
        7,
        {"cell_type": "markdown", "source": [1]},
    ]
    found = from_notebook(json.dumps({"cells": cells}).encode())
    assert found.text == "one\n\n"
    assert found.omissions == ("3 cells cannot be read (cells 2, 3, 4)",)
    with pytest.raises(NotConverted, match="left out: 1 cell cannot be read"):
        convert_here("a.ipynb", json.dumps({"cells": [{}]}).encode())
