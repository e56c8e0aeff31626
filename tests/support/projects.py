"""Folders of documents, and what a store has of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]
MARA = "# Billing\n\nThe lead of billing is Mara.\n"
JONAS = "# Billing\n\nThe lead of billing is Jonas.\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def listed(cli: Cli, *arguments: str) -> set[str]:
    return {r["source"] for r in cli("chunks", "ls", "--json", *arguments).records}
