"""Records of answers against docs/ask.schema.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "ask.schema.json").read_text(encoding="utf-8"))
for part in SCHEMA["$defs"].values():
    part["additionalProperties"] = False  # here each key is described; readers ignore keys that they do not know


def problems(record: Any, part: str = "Answer") -> list[str]:
    """Return where a record differs from the schema. part: a name under $defs."""
    schema = {"$ref": f"#/$defs/{part}", "$defs": SCHEMA["$defs"]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(record)]
