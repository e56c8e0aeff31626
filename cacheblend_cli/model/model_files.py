"""The small files of a model directory: text and JSON objects, or a message that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cacheblend_cli.errors import UsageError

AGAIN = "fetch the checkpoint again"


def read_text(path: Path) -> str:
    """The file's text. Raises UsageError when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: {error}", AGAIN) from error


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object; an empty one where there is no file. Raises UsageError when it holds something else."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(read_text(path))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}", AGAIN) from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no JSON object", AGAIN)
    return data
