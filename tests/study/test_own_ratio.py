"""The study of own ratios: a profile made on one half of the passages, questions over the other, and a page of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules


@pytest.fixture
def script(tmp_path: Path) -> Iterator[ModuleType]:
    with study_modules() as load, pytest.MonkeyPatch.context() as patch:
        module = load("own_ratio")
        patch.setattr(module, "STUDY", tmp_path / "study")
        yield module


def test_both_halves_are_measured_once_and_shown(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "model", "qwen2", max_position_embeddings=1024, num_hidden_layers=2)
    samples = [
        {
            "question": f"{WORDS[n]} of {WORDS[n + 1]}?",
            "ctxs": [{"text": f"Number {n} of these: {' '.join(WORDS[n : n + 12])}."}],
        }
        for n in range(8)
    ]
    (tmp_path / "musique_dev.json").write_text(json.dumps(samples))
    (tmp_path / "study").mkdir()

    def run(*flags: str) -> None:
        asked = [
            "own_ratio.py",
            "--work",
            str(tmp_path / "work"),
            "--data",
            str(tmp_path),
            "--model",
            str(tmp_path / "model"),
        ]
        monkeypatch.setattr(sys, "argv", [*asked, "--dtype", "float32", "--questions", "3", *flags])
        script.main()

    for _ in range(2):
        run("--text", "musique", "--side", "made", "--side", "held", "--ratio", "0.15", "--ratio", "0.3")
    rows = [json.loads(line) for line in (tmp_path / "work" / "model.jsonl").read_text().splitlines()]
    found = [(r["side"], r["prompt"], r["ratio"]) for r in rows]
    prompts = [("made", 0), ("made", 1), ("made", 2), ("held", 0), ("held", 1)]  # the third question finds one chunk
    assert found == [(*prompt, ratio) for prompt in prompts for ratio in (0.15, 0.3)], "each is measured once"
    run("--report")
    [model] = json.loads((tmp_path / "study" / "results" / "own_ratio.json").read_text())["models"]
    made = [row["kl"] for row in model["made"]]
    assert [len(kl) for kl in made] == [3, 3]
    page = (tmp_path / "study" / "own_ratio.md").read_text()
    assert f"| model | musique | 0.3 | 3 | {sum(made[1]) / 3:.3f} + " in page
