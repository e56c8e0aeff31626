"""What collecting a chunk can tell: each idea computes something else than the default, and what must be equal is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules

NAMES = (
    "plain again, 1 unrelated", "all directions, 1 unrelated", "r 1, share 1, 1 unrelated", "coefficients joint, r 2, 0.5, 1 unrelated",
    "own change, r 0, 1 unrelated", "own change, free, times .5, 1 unrelated", "own change, free, 4 bits, 1 unrelated",
    "late 1.00 and 1.00 from 1/2, regressed", "late 0.83 and 1.17 from 1/2, regressed", "late 0.83 and 1.17 from 1/2, true",
    "pair exact", "pair exact, as many tokens", "prior all sum 0.2, times 3",
)  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """MuSiQue's number of questions, each over ten passages of words."""

    def passage(number: int) -> str:
        return " ".join(WORDS[(number + w) % len(WORDS)] for w in range(12)) + f" {number}. "

    items = [
        {
            "question": f"where {n}?",
            "answers": ["x"],
            "ctxs": [{"title": "", "text": passage(3 * n + p)} for p in range(10)],
        }
        for n in range(75)
    ]
    (tmp_path / "musique_dev.json").write_text(json.dumps(items))
    return tmp_path


def test_every_idea_is_measured_beside_the_default(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama-gqa", max_position_embeddings=2048, num_hidden_layers=6)
    flags = {
        "data": data, "model": tmp_path / "model", "dtype": "float32", "places": "0", "records": tmp_path / "kept",
        "out": tmp_path / "out.json", "ratio": 0.15,
    }  # fmt: skip
    given = [str(x) for name, of in flags.items() for x in (f"--{name}", of)] + [
        x for n in NAMES for x in ("--only", n)
    ]
    monkeypatch.setattr("sys.argv", ["nearer_ideas.py", *given])
    with study_modules() as load:
        load("nearer_ideas").main()
    rows = {row["label"].removesuffix(" 0.15"): row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == ["default", *NAMES]
    kl = {name: row["kl"][0] for name, row in rows.items()}
    assert kl["plain again, 1 unrelated"] == pytest.approx(kl["default"], rel=1e-3)
    others = [kl[name] for name in kl if name != "plain again, 1 unrelated"]
    assert len(set(others)) == len(others), "each computes something else"


def test_pairs_are_counted_in_the_order_of_the_hits() -> None:
    near = {"a": ["b"], "b": ["c"], "c": ["a", "b"], "d": []}
    with study_modules() as load:
        counted = load("pairs").counted
    hits = [["b", "a"], ["a", "d", "b"], ["d", "a"], ["b", "d", "c"]]
    one, two = (counted(hits, near, m) for m in (1, 2))
    assert [one[name] for name in ("prompts", "leading", "behind_the_best", "any")] == [4, 1, 1, 3]
    assert [two[name] for name in ("leading", "behind_the_best", "any")] == [1, 2, 3]
