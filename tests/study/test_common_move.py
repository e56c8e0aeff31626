"""Shares of the common change by which K is moved, and records that belong to one version of the corrections."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules

PASSAGES = [{"title": "", "text": " ".join(WORDS[p % 7 : p % 7 + 9]) + f" {p}. "} for p in range(10)]


@pytest.fixture
def common_move() -> Iterator[ModuleType]:
    with study_modules() as load:
        yield load("common_move")


def test_a_run_goes_on_from_records_of_the_same_corrections(
    common_move: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", "llama-gqa", max_position_embeddings=1024)
    (tmp_path / "musique_dev.json").write_text(
        json.dumps(
            [{"question": f"where {n}?", "answers": ["x"], "ctxs": PASSAGES[n:] + PASSAGES[:n]} for n in range(4)]
        )
    )

    def run(places: str) -> tuple[dict, int]:
        flags = ("--data", tmp_path, "--model", tmp_path / "model", "--dtype", "float32", "--places", places)
        kept = tmp_path / "records.jsonl"
        monkeypatch.setattr(
            "sys.argv", ["common_move.py", *map(str, (*flags, "--records", kept, "--out", tmp_path / "out.json"))]
        )
        common_move.main()
        return json.loads((tmp_path / "out.json").read_text()), len(kept.read_text().splitlines())

    first, lines = run("1")
    assert lines == 1
    assert len({first[name]["mean"][0] for name in common_move.SHARES}) == 3
    assert first["all"]["minus_all"] == [0, 0, 0]
    both, lines = run("1,0")
    assert lines == 2
    assert [both[name]["by_question"][0] for name in common_move.SHARES] == [
        first[n]["by_question"][0] for n in common_move.SHARES
    ]
    monkeypatch.setattr(importlib.import_module("results"), "CORRECTION", "another")
    assert run("1")[1] == 3
