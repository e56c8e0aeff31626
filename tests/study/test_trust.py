"""Powers of the explained share: what they do to K's move, and records that belong to one version of the corrections."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.blend import corrections

PASSAGES = [{"title": "", "text": " ".join(WORDS[p % 7 : p % 7 + 9]) + f" {p}. "} for p in range(10)]


@pytest.fixture
def trust() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "study"))
        yield importlib.import_module("trust")


def test_the_share_is_one_itself_or_its_square(trust: ModuleType) -> None:
    lower, cross = torch.eye(2)[None] * 2, torch.tensor([[[1.0, 2.0, 0.5], [0.5, 1.0, 0.0]]])
    share = corrections._explained(lower, cross)
    for power, expected in ((0, torch.ones_like(share)), (1, share), (2, share.square())):
        with trust.trusting(power):
            torch.testing.assert_close(corrections._explained(lower, cross), expected)
    assert torch.equal(corrections._explained(lower, cross), share)


def test_a_run_goes_on_from_records_of_the_same_corrections(
    trust: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
            "sys.argv", ["trust.py", *map(str, (*flags, "--records", kept, "--out", tmp_path / "out.json"))]
        )
        trust.main()
        return json.loads((tmp_path / "out.json").read_text()), len(kept.read_text().splitlines())

    first, lines = run("1")
    assert lines == 1
    assert len({first[name]["mean"][0] for name in trust.POWERS}) == 3
    assert first["unshrunk"]["minus_unshrunk"] == [0, 0, 0]
    both, lines = run("1,0")
    assert lines == 2
    assert [both[name]["by_question"][0] for name in trust.POWERS] == [first[n]["by_question"][0] for n in trust.POWERS]
    monkeypatch.setattr(importlib.import_module("results"), "correction_version", lambda: "another")
    assert run("1")[1] == 3
