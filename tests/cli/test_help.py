"""What help shows first, and what a shell completes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.cli import completion

Cli = Callable[..., Any]


def test_ask_helps_in_two_screens_and_research_is_last(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = cli("ask", "--help").out.splitlines()
    assert len(lines) <= 110  # two screens of 55 lines
    first = "\n".join(lines[:45])
    assert all(f"--{flag} " in first for flag in ("chunks", "model", "store", "ratio", "search", "max-tokens", "json"))
    assert "--check-layer" not in first
    panels = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert panels[:2] == ["Arguments:", "Options:"]
    assert panels[-1] == "Blending, for research:"


def test_every_setting_that_ask_takes_is_in_its_help_once(cli: Cli) -> None:
    text = cli("ask", "--help").out
    for flag in ("--search", "--deviation", "--embeddings", "--salt", "--seed", "--template-var"):
        assert sum(line.strip().startswith(f"{flag} ") for line in text.splitlines()) == 1


def test_ids_documents_and_models_are_completed(cli: Cli, stored: list[str]) -> None:
    assert sorted(completion.chunk_ids("")) == sorted(name[:12] for name in stored)
    assert completion.chunk_ids(f"{stored[0]},{stored[1][:3]}")[0].startswith(f"{stored[0]},{stored[1][:3]}")
    assert completion.sources("docs/a") == ["docs/alpha.md"]
    assert "handbook" in completion.models("hand")


def test_completion_without_a_store_is_silent(cli: Cli) -> None:
    assert completion.chunk_ids("") == completion.sources("") == []


@pytest.mark.parametrize(
    ("shell", "variables"),
    [
        ("bash", {"COMP_WORDS": "cacheblend ask --source ", "COMP_CWORD": "3"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "cacheblend ask --source "}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "cacheblend ask --source ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_a_shell_is_told_and_nothing_heavy_is_imported(
    stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, variables: dict[str, str]
) -> None:
    code = (
        "import sys, atexit; from cacheblend_cli.cli.main import main; heavy = ('torch', 'numpy', 'transformers')\n"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr)); main()"
    )
    for name, value in {"_CACHEBLEND_COMPLETE": f"complete_{shell}", **variables}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "docs/alpha.md" in done.stdout
    assert done.stderr.endswith("[]\n")
