"""Fixtures: the commands run in this process, over a store and a random model of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import WORDS, write_checkpoint
from command_line import Cli, in_process


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    write_checkpoint(path, "qwen2", max_position_embeddings=1024)
    return path


@pytest.fixture
def cli(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in an empty directory with a store and a random model of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("CACHEBLEND_MODEL", str(model))
    return in_process(monkeypatch, capsys)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for d, name in enumerate(("alpha", "beta")):
        text = "\n\n".join(f"{name} {p} " + " ".join(WORDS[(d + p) % 5 : (d + p) % 5 + 8]) + "." for p in range(3))
        (folder / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    return folder


@pytest.fixture
def stored(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Chunks collected alone, so that a chunk after another needs repair; later commands collect chunks in the same
    way."""
    monkeypatch.setenv("CACHEBLEND_CONTEXT", "sink")
    result = cli("precompute", "docs", "--chunk-tokens", "40", "--json")
    assert result.code == 0, result.err
    return [r["id"] for r in result.records]
