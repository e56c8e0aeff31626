"""JSON: notebooks (text and code cells, without their outputs), and records with `text`, and optionally `id` and
`title`, in JSON or JSON lines. Each record is cut separately. JSON without such records is read as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cacheblend_cli.corpus.converters.converter import NoDocument, decoded, joined
from cacheblend_cli.corpus.layout import Converted, Mark, TextLayout

_TEXT, _TITLE, _ID = ("text", "content", "body"), ("title", "name"), ("id", "_id")


def from_json_lines(data: bytes) -> Converted:
    return joined(_lines(decoded(data)), "markdown", apart=True)


def _lines(text: str) -> Iterator[tuple[str, Mark]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise NoDocument(f"line {number} is not JSON", "broken JSON") from error
            except RecursionError as error:
                raise NoDocument(f"line {number} is nested too deeply", "broken JSON") from error
            if isinstance(record, Mapping):
                yield _record_text(record), Mark(0, _part(record), number)
            else:
                yield record if isinstance(record, str) else line, Mark(0, "", number)


def from_json_records(data: bytes) -> Converted:
    text = decoded(data)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a dialect with comments, or nested too deeply: read it as text
        return Converted(text, TextLayout("code"))
    records = _records(value)
    if not records:
        return Converted(text, TextLayout("code"))
    numbered = enumerate(records, 1)
    parts = ((_record_text(r), Mark(0, _part(r) or f"record {number}")) for number, r in numbered)
    return joined(parts, "markdown", apart=True)


def _records(value: Any) -> list[Mapping[str, Any]]:
    """Return the records in a list or in an object's only list, else the object itself; [] if any has no text."""
    if isinstance(value, Mapping) and not _field(value, _TEXT):
        lists = [inner for inner in value.values() if isinstance(inner, list)]
        value = lists[0] if len(lists) == 1 else None
    found = value if isinstance(value, list) else [value]
    good = [record for record in found if isinstance(record, Mapping) and _field(record, _TEXT)]
    return good if len(good) == len(found) else []


def _record_text(record: Mapping[str, Any]) -> str:
    """Return the title as a heading, and the text. A record without text gives all its fields."""
    text, title = _field(record, _TEXT), _field(record, _TITLE)
    if not text:
        plain = {n: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for n, v in record.items()}
        return "\n".join(f"{name}: {value}" for name, value in plain.items())
    return f"# {' '.join(title.split())}\n\n{text}" if title else text


def _part(record: Mapping[str, Any]) -> str:
    name = next((str(record[n]) for n in _ID if isinstance(record.get(n), (str, int))), "")
    return f"record {name}" if name else ""


def _field(record: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first non-blank text field among `names`, else ""."""
    return next((record[n] for n in names if isinstance(record.get(n), str) and record[n].strip()), "")


def from_notebook(data: bytes) -> Converted:
    try:
        cells = list(_cells(json.loads(decoded(data))))
    except RecursionError as error:
        raise NoDocument("is nested too deeply", "broken notebooks") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
