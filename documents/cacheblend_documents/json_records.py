"""Records in JSON or JSON lines: objects with a text and other fields, or messages of chats.

Records are cut separately, the messages of a chat are not. JSON without records is read as plain text. One record with
a text is enough: the others can have another form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

from cacheblend_documents.chats import rich_text, sent_message
from cacheblend_documents.converted import Converted, Mark, joined, shortened
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import decoded, without_controls

_TEXT, _TITLE, _ID = ("text", "content", "body"), ("title", "name"), ("id", "_id")
_ESCAPED = re.compile(r"\\(.)")
_DEEPEST = 3  # nested objects whose fields get a line each


def from_json_lines(data: bytes) -> Converted:
    omissions = Omissions()
    return joined(_lines(decoded(data), omissions), "markdown", is_split=True, omissions=omissions)


def _lines(text: str, omissions: Omissions) -> Iterator[tuple[str, Mark]]:
    """Yield the texts of the lines. omissions: gets those that cannot be read."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = _loaded(line)
                found = (record_text(record), _part(record)) if isinstance(record, Mapping) else (_plain(record), "")
            except (ValueError, RecursionError) as error:
                what = "not JSON" if isinstance(error, ValueError) else "nested too deeply"
                omissions.add(f"line is {what}", f"line {number}", plural=f"lines are {what}")
            else:
                yield found[0], Mark(0, found[1], number)


def from_json_records(data: bytes) -> Converted:
    text = decoded(data)
    try:
        value = _loaded(text)
        parts = _parts(value)
        if not parts and _ESCAPED.search(text):
            return Converted(_unescaped(value, "\n" in text.strip()), "code", keeps_lines=False)
    except (ValueError, RecursionError):  # a dialect with comments, or nested too deeply: read it as text
        parts = []
    if not parts:
        return Converted(text, "code")
    return joined(parts, "markdown", is_split=not _is_chat(_list(value)[1]))


def _loaded(text: str) -> Any:
    """Parse JSON, without control sequences of terminals.

    Some exports (Facebook, Instagram) write each byte of UTF-8 as a character. It is decoded if all strings are so.
    """
    value = json.loads(text)
    if "\\" in text or not text.isascii():
        value = _mapped(value, without_controls)
        with suppress(UnicodeError):
            return _mapped(value, lambda string: string if string.isascii() else string.encode("latin-1").decode())
    return value


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON with all strings changed, except names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return {k: _mapped(inner, change) for k, inner in value.items()} if isinstance(value, dict) else value


def _unescaped(value: Any, is_indented: bool) -> str:
    """Return JSON as people read it: escaped letters and line ends as themselves."""
    text = json.dumps(value, ensure_ascii=False, indent=2 if is_indented else None)
    shown = {"n": "\n", "r": "", "t": " ", '"': '"'}
    return _ESCAPED.sub(lambda escape: shown.get(escape[1], escape[0]), text)


def _parts(value: Any) -> list[tuple[str, Mark]]:
    """Return the records with their places; [] if none of them is a message or has a text."""
    around, found = _list(value)
    if not any(map(_has_text, found)):
        return []
    outer = "\n".join(_fields(around))
    what = "message" if _is_chat(found) else "record"
    numbered = ((_item_text(r), Mark(0, _part(r) or f"{what} {number}")) for number, r in enumerate(found, 1))
    return [(outer, Mark(0)), *numbered] if outer else list(numbered)


def _list(value: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """Return the fields around the records, and the records: a list, an object's only list with texts, or the object
    itself."""
    if isinstance(value, list):
        return {}, value
    if not isinstance(value, Mapping) or _field(value, _TEXT):
        return {}, [value]
    lists = [name for name, inner in value.items() if isinstance(inner, list) and any(map(_has_text, inner))]
    if len(lists) != 1:
        return {}, []
    return {name: inner for name, inner in value.items() if name != lists[0]}, value[lists[0]]


def _has_text(record: Any) -> bool:
    return isinstance(record, Mapping) and (_is_message(record) or bool(_field(record, _TEXT)))


def _item_text(record: Any) -> str:
    return record_text(record) if isinstance(record, Mapping) else _plain(record)


def record_text(record: Mapping[str, Any]) -> str:
    """Return the title as a heading, the other fields one a line, and the text."""
    if _is_message(record):
        return _message_text(record)
    text, title = _field(record, _TEXT), _field(record, _TITLE)
    if not text:
        return "\n".join(_fields(record))
    used = {_first(record, _TEXT), _first(record, _TITLE)} - {""}
    short = {name: shortened(str(record[name])) for name in _ID if _is_id(record, name)}
    parts = [f"# {' '.join(title.split())}" if title else "", "\n".join(_fields({**record, **short}, used)), text]
    return "\n\n".join(filter(None, parts))


def _is_chat(records: list[Any]) -> bool:
    """Return whether most of the records with a text are messages."""
    texts = [record for record in records if _has_text(record)]
    return bool(texts) and 2 * sum(map(_is_message, texts)) > len(texts)


def _is_message(record: Mapping[str, Any]) -> bool:
    return (isinstance(record.get("role"), str) and "content" in record) or sent_message(record) is not None


def _message_text(record: Mapping[str, Any]) -> str:
    """Return "Mara (user): text", and the other fields."""
    if sent := sent_message(record):
        return "\n".join([f"{sent.sender}: {sent.text}", f"date: {sent.time}", *_fields(record, sent.used)])
    name, content = record.get("name"), record["content"]
    used = {"role", "content"}
    speaker = record["role"]
    if isinstance(name, str) and name.strip():
        speaker = f"{name} ({speaker})"
        used.add("name")
    if isinstance(content, list):  # parts
        texts = [
            part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else _plain(part)
            for part in content
        ]
        content = "\n".join(texts)
    return "\n".join([f"{speaker}: {_plain(content)}", *_fields(record, used)])


def _fields(record: Mapping[str, Any], used: Set[str] = frozenset(), before: str = "", depth: int = 1) -> Iterator[str]:
    """Yield "name: value" of all fields that have a value; "outer.inner: value" of those of objects in it."""
    for name, value in record.items():
        if name in used or value in (None, "", [], {}):
            continue
        named = shortened(f"{before}{name}")
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _fields(value, before=f"{named}.", depth=depth + 1)
        elif isinstance(value, list) and _is_chat(value):
            yield from map(_item_text, value)
        elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
            for inner in value:
                text = ", ".join(_fields(inner, depth=depth + 1)) if isinstance(inner, Mapping) else _plain(inner)
                yield f"{named}: {text}"
        else:
            yield f"{named}: {_plain(value)}"


def _plain(value: Any) -> str:
    """Return a value as short text: a string as it is, a list of plain values with commas, else JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not any(isinstance(inner, (list, Mapping)) for inner in value):
        return ", ".join(map(_plain, value))
    return json.dumps(value, ensure_ascii=False)


def _part(record: Any) -> str:
    name = next((str(record[name]) for name in _ID if _is_id(record, name)), "")
    return f"record {name}" if name else ""


def _is_id(record: Any, name: str) -> bool:
    return isinstance(record, Mapping) and isinstance(record.get(name), (str, int))


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first of `names` with a non-blank text, else ""."""
    return next((name for name in names if rich_text(record.get(name)).strip()), "")


def _field(record: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first non-blank text field among `names`, else ""."""
    name = _first(record, names)
    return rich_text(record[name]) if name else ""
