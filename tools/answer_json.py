"""The JSON form of an answer: `ask --json`, and `blend` of HTTP responses.

`reference.py` writes docs/json.md and docs/ask.schema.json from the types of an answer. A field's comment, or the
docstring of a property, is its description in both.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from dataclasses import is_dataclass
from typing import Any, NotRequired, TypedDict, get_args, get_type_hints

import msgspec

from cacheblend_cli.cli.ask import AnswerRecord
from cacheblend_cli.server.answer_report import OF_A_COMMAND, REUSED, Blend, BlendChunk
from cacheblend_cli.server.passages import MessagePassage
from cacheblend_cli.types import ChunkUse, Claim, Confirmation, LayerReport, TierUse, Timing, TokenLogprob, Verification
from cacheblend_cli.types.answer import OPTIONAL, Answer
from cacheblend_cli.types.auto import Auto

_KEYS = {"text": "answer", "confirmation": "confirm", "chosen": ""}  # field -> key, if they differ
_COMPUTED = ("generated_tokens", "tokens_per_step")  # properties that are keys
_COMMENT = re.compile(r"\s*(?:# (.+)|\w+: [^#]*#\s*(.+))")


def _answer() -> dict[str, Any]:
    """Return the type of each key of an answer."""
    hints = get_type_hints(Answer) | {"auto": Auto}
    hints |= {name: get_type_hints(getattr(Answer, name).fget)["return"] for name in _COMPUTED}
    found = {key: hint for field, hint in hints.items() if (key := _KEYS.get(field, field))}
    every = {key: NotRequired[(get_args(hint) or (hint,))[0]] for key, hint in get_type_hints(AnswerRecord).items()}
    for key, hint in found.items():
        is_union = type(None) in get_args(hint)
        every[key] = NotRequired[get_args(hint)[0] if is_union else hint] if key in OPTIONAL else hint
    return every


_ANSWER = _answer()
_BLEND = get_type_hints(Blend, include_extras=True) | {name: _ANSWER[name] for name in REUSED}
_TIMING = {name: hint for name, hint in get_type_hints(Timing).items() if name not in OF_A_COMMAND}
SECTIONS = {
    "Answer": (TypedDict("Answer", _ANSWER), Answer, AnswerRecord),  # type: ignore[misc]
    **{kind.__name__: (kind, kind) for kind in (ChunkUse, Claim, Timing, Verification, Confirmation, TokenLogprob, LayerReport, Auto, TierUse)},
    "Blend": (TypedDict("Blend", _BLEND | {"timing": TypedDict("BlendTiming", _TIMING)}), Blend, Answer),  # type: ignore[misc]
    "BlendChunk": (BlendChunk, BlendChunk),
    "BlendTiming": (None, Timing),
    "MessagePassage": (MessagePassage, MessagePassage),
}  # fmt: skip
"""Section -> type of its JSON object, and the classes that describe its keys."""


def _descriptions(kind: type) -> dict[str, str]:
    """Return the comment beside or above each field of a class, and the docstrings of properties."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, [body] = source.splitlines(), ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found = dict[str, str]()
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = _COMMENT.fullmatch(lines[node.lineno - 1]) or _COMMENT.fullmatch(lines[node.lineno - 2])
            if own:
                found[node.target.id] = (own[1] or own[2]).replace("None", "null")
        elif isinstance(node, ast.FunctionDef) and node.name in _COMPUTED:
            text = ast.get_docstring(node) or ""
            found[node.name] = text[:1].lower() + text[1:].rstrip(".")
    return {_KEYS.get(name, name): text for name, text in found.items()} if kind is Answer else found


def schema() -> dict[str, Any]:
    """Return the JSON Schema: the object of `ask --json`, and under $defs/Blend that of HTTP responses."""
    kinds = [kind for kind, *_ in SECTIONS.values() if kind is not None]
    (answer, *_), parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for name, (kind, *described) in SECTIONS.items():
        part, about = parts[name], dict[str, str]()
        for each in described:
            about |= _descriptions(each)
        part["description"] = " ".join((inspect.getdoc(described[0]) or "").split())
        if is_dataclass(kind):  # vars() of it: each field is there
            part["required"] = list(part["properties"])
        missing = part["properties"].keys() - about.keys()
        assert not missing, f"{name}: a comment is missing beside {missing}"
        part["properties"] = {key: part["properties"][key] for key in about if key in part["properties"]}
        for key, field in part["properties"].items():
            field.pop("default", None)
            named = field.get("$ref", "").rpartition("/")[2]
            if "enum" in parts.get(named, {}):
                field["enum"] = parts[named]["enum"]
                del field["$ref"]
            field["description"] = about[key]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cacheblend ask --json"}
    return {**head, **answer, "$defs": {name: parts[name] for name in SECTIONS}}


def schema_file() -> str:
    return json.dumps(schema(), indent=1) + "\n"


_HEAD = """# JSON of an answer

Fields of `ask --json` and of `blend` in HTTP responses, written by `python -m tools.reference`. The same as a JSON
Schema: [ask.schema.json](ask.schema.json). Names that end in `_s` are seconds. An optional field is absent unless it applies.

`schema_version` is raised when a field is removed or changes its meaning. New fields do not raise it: ignore those you
do not know. What a request may contain is in [serve.md](serve.md#openais-api) and at `/openapi.json`.
"""


def page() -> str:
    """Return docs/json.md."""
    parts, text = schema()["$defs"], _HEAD
    for section in SECTIONS:
        part = parts[section]
        rows = [
            f"| `{name}` | {_shown(field)} | {'' if name in part['required'] else 'optional: '}{_cell(field['description'])} |"
            for name, field in part["properties"].items()
        ]
        text += "\n".join(
            (
                "",
                f"## {section}",
                "",
                part["description"],
                "",
                "| field | type | meaning |",
                "|---|---|---|",
                *rows,
                "",
            )
        )
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shown(field: dict[str, Any]) -> str:
    """Return a field's type for readers."""
    if "anyOf" in field:
        return " or ".join(_shown(each) for each in field["anyOf"])
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        items = field.get("items")
        return f"list of {_shown(items)}" if items else "list"
    return {"number": "number", "integer": "integer", "string": "text", "boolean": "true or false"}.get(
        field["type"], field["type"]
    )
