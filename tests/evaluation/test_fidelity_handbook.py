"""benchmarks/fidelity_handbook.py: a group measured anew replaces that group, and other data never lands on the committed page."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALM, HARDWARE = {"value": 0.5, "low": 0.4, "high": 0.6}, {"cpu": "x", "cores": 2, "threads": 1, "torch": "2"}


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, its committed result and page being copies."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("fidelity_handbook")
    monkeypatch.setattr(module, "OUT", tmp_path / "fidelity_handbook.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "hardware", lambda: HARDWARE)
    (tmp_path / "page.md").write_text(
        "prose\n\n<!-- mask -->\n<!-- end -->\n\nmore\n\n<!-- contexts -->\n<!-- end -->\n"
    )
    return module


def row(label: str, kl: float) -> dict[str, Any]:
    return {
        "label": label, "setting": {"mode": "blend"}, "ratio": 0.15, "budget": 0.1, "exact_match": CALM, "f1": CALM,
        "norm_f1": CALM, "top1": CALM, "kl": {**CALM, "value": kl}, "k_error": [0.0, 0.1], "v_error": [0.0, 0.1],
        "attention_error": [0.0, 0.1],
    }  # fmt: skip


def result(**groups: dict[str, float]) -> dict[str, Any]:
    labels = {name: list(rows) for name, rows in groups.items()}
    settings = [row("reuse", 3.0), *(row(label, kl) for rows in groups.values() for label, kl in rows.items())]
    return {"hardware": HARDWARE, "model": "handbook", "questions": 520, "groups": labels, "settings": settings}


def test_a_group_anew_leaves_the_others_as_they_are(fidelity: ModuleType, tmp_path: Path) -> None:
    old = result(mask={"a": 1.0, "gone": 1.0}, contexts={"b": 2.0})
    found = fidelity.merged(old, result(mask={"a": 4.0, "new": 5.0}))
    assert found["groups"] == {"mask": ["a", "new"], "contexts": ["b"]}
    assert {r["label"]: r["kl"]["value"] for r in found["settings"]} == {"reuse": 3.0, "a": 4.0, "b": 2.0, "new": 5.0}
    for other in ({"model": "x"}, {"questions": 519}, {"hardware": {}}):
        with pytest.raises(ValueError, match=next(iter(other))):
            fidelity.merged(old, result(mask={"a": 4.0}) | other)
    fidelity.write_report(found, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("prose\n")
    assert [line.split(" | ")[0] for line in text.splitlines() if " | 10.0% | " in line] == ["| a", "| new", "| b"]


def test_another_out_gets_a_page_of_its_own(
    fidelity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(result(mask={"a": 1.0})))
    before = (tmp_path / "page.md").read_text()
    monkeypatch.setattr("sys.argv", ["fidelity_handbook.py", "--report", "--out", str(tmp_path / "mine.json")])
    fidelity.main()
    assert "| a | 0.15 |" in (tmp_path / "mine.md").read_text()
    assert (tmp_path / "mine.svg").exists()
    assert (tmp_path / "page.md").read_text() == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--only", "masks"), "invalid choice: 'masks'"),
        (("--limit", "5"), "give --out"),
        (("--data", "x.jsonl"), "give --out"),
        (("--model", "x", "--out", "x.json", "--page", "PAGE"), "give --out"),
        (("--only", "mask"), "differs in questions"),
    ],
)
def test_what_would_spoil_the_page_is_refused_before_anything_is_measured(
    fidelity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    (tmp_path / "fidelity_handbook.json").write_text(json.dumps(result(mask={"a": 1.0}) | {"questions": 519}))
    monkeypatch.setattr(fidelity, "measure", lambda *told: pytest.fail("measured"))
    flags = tuple(str(tmp_path / "page.md") if flag == "PAGE" else flag for flag in flags)
    monkeypatch.setattr("sys.argv", ["fidelity_handbook.py", *flags])
    with pytest.raises(SystemExit) as ended:
        fidelity.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
