"""Bundled data: eight office pages to try commands on, records with questions, and a small model with the handbook of
an invented company."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CHUNK_TOKENS = 56
"""Chunk size at which nearly every paragraph of the handbook is a chunk of its own."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class HandbookQuestion:
    """answer: expected text. source: file of the answer. across: its paragraph does not name the person it is about."""

    question: str
    answer: str
    source: str
    across: bool


def model_dir() -> Path:
    """Directory of the demo checkpoint (Hugging Face format)."""
    return _HERE / "model"


def handbook_dir() -> Path:
    """Directory of the handbook's Markdown files."""
    return _HERE / "handbook"


def office_dir() -> Path:
    """Directory of eight short Markdown files, which `cacheblend demo --write` copies."""
    return _HERE / "office"


def questions() -> list[HandbookQuestion]:
    lines = (_HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [HandbookQuestion(**json.loads(line)) for line in lines]
