"""Ways to spend the same tokens: each is measured beside the default at both ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules


def test_every_variant_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passages = [{"title": "", "text": " ".join(WORDS[p % 7 : p % 7 + 9]) + f" {p}. "} for p in range(10)]
    write_checkpoint(tmp_path / "model", "llama-gqa", max_position_embeddings=1024, num_hidden_layers=6)
    (tmp_path / "musique_dev.json").write_text(
        json.dumps([{"question": f"where {n}?", "answers": ["x"], "ctxs": passages[n:] + passages[:n]} for n in (0, 1)])
    )
    flags = {
        "data": tmp_path, "model": tmp_path / "model", "dtype": "float32", "places": "0", "records": tmp_path / "kept",
        "out": tmp_path / "out.json",
    }  # fmt: skip
    monkeypatch.setattr("sys.argv", ["nearer.py", *(str(x) for name, of in flags.items() for x in (f"--{name}", of))])
    with study_modules() as load:
        nearer = load("nearer")
        for _ in range(2):
            nearer.main()
        names = list(nearer.variants())
    assert len((tmp_path / "kept").read_text().splitlines()) == 1, "a second run measures nothing again"
    rows = {row["label"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == [f"{name} {ratio}" for ratio in (0.15, 0.05) for name in names]
    kl = {name: rows[f"{name} 0.15"]["kl"][0] for name in names}
    assert len(set(kl.values())) == len(kl), "each computes something else"
    assert rows["default 0.15"]["less_default"] == [0, 0, 0]
