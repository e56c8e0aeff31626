"""The bundled demo: a small model, the handbook of an invented company, and questions about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CHUNK_TOKENS = 56
"""Cuts the handbook so that nearly every paragraph is a chunk of its own."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class DemoQuestion:
    """across: the answer stands in a paragraph that does not name the person. source: the handbook page."""

    question: str
    answer: str
    source: str
    across: bool


def model_dir() -> Path:
    """The demo checkpoint in HF format."""
    return _HERE / "model"


def handbook_dir() -> Path:
    """The handbook's Markdown files."""
    return _HERE / "handbook"


def heldout_path() -> Path:
    """JSON lines of held-out samples: question, answers, across, ctxs [{title, text}] in prompt order."""
    return _HERE / "heldout.jsonl"


def questions() -> list[DemoQuestion]:
    """Questions about the handbook, with answers."""
    lines = (_HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [DemoQuestion(**json.loads(line)) for line in lines]
