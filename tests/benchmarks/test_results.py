"""Pages of benchmarks/results are those of the committed JSON."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGES = {
    "decode": "decode", "peers_files": "peers", "peers_start": "peers", "prefill": "prefill", "reading": "reading",
    "serve": "serve", "soak": "soak", "speculation": "speculation", "store": "store", "torture": "torture", "long_prompts": "prefill",
    "prefill_float32": "prefill",
}  # fmt: skip
"""Result -> its script."""
OTHER_PAGES = {"long_prompts": "long_page", "prefill_float32": "float32_page"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_figures_of_its_json(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script, path = importlib.import_module(PAGES[name]), BENCHMARKS / "results" / f"{name}.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    page = getattr(script, OTHER_PAGES.get(name, "page"))(result)
    importlib.import_module("machine").save(result, tmp_path / path.name, page)
    assert (tmp_path / path.name).read_text() == path.read_text()
    assert (tmp_path / path.name).with_suffix(".md").read_text() == path.with_suffix(".md").read_text()


def test_the_table_of_reading_is_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("reading")
    result = json.loads((BENCHMARKS / "results" / "reading.json").read_text(encoding="utf-8"))
    page = (BENCHMARKS.parent / "docs" / "speed.md").read_text(encoding="utf-8")
    assert script.docs_table(result) in page


def test_results_are_small() -> None:
    assert sum(path.stat().st_size for path in (BENCHMARKS / "results").glob("*.*")) < 430_000
