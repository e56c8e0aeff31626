"""benchmarks/fidelity.py: its sets hold what their questions ask for, and its page is of what was measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import write_checkpoint

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig
from cacheblend_cli.evaluation.samples import Sample, pages
from cacheblend_cli.evaluation.settings import Setting

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fidelity_sets")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of questions, each over ten passages of sentences of their own."""
    said = [
        {
            "question": f"question {number}?",
            "answers": ["yes"],
            "ctxs": [
                {"title": "", "text": " ".join(f"passage {number} {c} says the thing {s} here." for s in range(12))}
                for c in range(10)
            ],
        }
        for number in range(4)
    ]
    (tmp_path / "rag").mkdir()
    (tmp_path / "musique_dev.json").write_text(json.dumps(said))
    (tmp_path / "rag/1.json").write_text(json.dumps({"0": "a text", "1": "another", "chunk_num": 2, "query": "what?"}))
    return tmp_path


def test_every_set_is_there_and_the_same_each_time(sets: ModuleType, data: Path) -> None:
    made = {name: make() for name, make in sets.read_sets(data).items()}
    assert {name: make() for name, make in sets.read_sets(data).items()} == made
    assert [len(made["musique"][0].contexts), len(made["musique-10"][0].contexts), len(made["rag"])] == [4, 10, 1]
    for name, chunks in (("needles-2k", 4), ("tracking-2k", 4), ("needles-7k", 13), ("tracking-7k", 13)):
        assert {len(sample.contexts) for sample in made[name]} == {chunks}


@pytest.mark.parametrize("name", ["needles-2k", "needles-7k"])
def test_the_code_asked_for_is_said_once_and_not_in_the_first_chunk(sets: ModuleType, data: Path, name: str) -> None:
    for sample in sets.read_sets(data)[name]():
        thing = sample.question.split(" the ")[2].split("?")[0]
        said = f"The access code of the {thing} is {sample.answers[0]}."
        assert [c.text.count(said) for c in sample.contexts].count(1) == 1
        assert said not in sample.contexts[0].text
        assert sum(c.text.count("The access code of") for c in sample.contexts) == 2 * len(sample.contexts)


@pytest.mark.parametrize("name", ["tracking-2k", "tracking-7k"])
def test_the_value_asked_for_is_reached_over_three_chunks(sets: ModuleType, data: Path, name: str) -> None:
    for sample in sets.read_sets(data)[name]():
        asked, links = sample.question.split()[3], 0
        while True:
            [told] = [c.text for c in sample.contexts if f"{asked} has the " in c.text]
            after = told.split(f"{asked} has the ")[1]
            if after.startswith("value "):
                break
            asked, links = after.removeprefix("same value as ").split(".")[0], links + 1
        assert links == 2
        assert after.removeprefix("value ").split(".")[0] == sample.answers[0]


def test_pages_are_paragraphs_that_tile_their_passage(sets: ModuleType, data: Path) -> None:
    for sample, whole in zip(sets.read_sets(data)["pages"](), sets.read_sets(data)["musique"](), strict=True):
        for page in range(2):
            paragraphs = sample.contexts[4 * page : 4 * page + 4]
            assert [len(c.before) for c in paragraphs] == [0, 1, 2, 3]
            assert "".join(c.text for c in paragraphs) == whole.contexts[page].text + "\n\n"


def row(label: str, kl: float | None, ratio: float = 0.15, **more: Any) -> dict[str, Any]:
    def calm(value: float) -> dict[str, float]:
        return {"value": value, "low": value / 2, "high": value * 2}

    told = None if kl is None else calm(kl)
    return {
        "label": label, "ratio": ratio, "budget": 0.9 * ratio, "kl": told, "kl_median": kl and 0.8 * kl,
        "top1": told and calm(0.9), "same_answer": calm(0.5),
        "found": calm(0.25), "likelihood": calm(-2.0),
    } | more  # fmt: skip


def test_the_page_keeps_its_prose_and_shows_every_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("fidelity_report")
    ratios = (0.05, 0.15, 0.3)
    settings = [row("full prefill", None, 1.0), row("reuse", 0.2, 0.0)]
    settings += [
        row(f"{name} {r:g}", kl / r, r) for name, kl in (("hkvd", 0.015), ("mine, at 2", 0.003)) for r in ratios
    ]
    found = {"questions": 3, "settings": settings}
    settings[3]["first_token"] = 0.4
    hardware = {"cpu": "x", "cores": 2, "threads": 1, "torch": "2"}
    result = {
        "hardware": hardware, "model": "m", "dtype": "float32", "half": "test",
        "sets": {"musique": {**found, "timed": {"hardware": hardware, "full_s": 2.0, "rounds": 3}}, "needles-2k": {**found, "settings": settings[:4]}},
    }  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(
        "prose\n\n<!-- musique -->\nbefore\n<!-- end -->\n\nmore\n\n<!-- musique by ratio -->\n<!-- end -->\n"
    )
    report.write_report(result, page)
    text = page.read_text()
    assert text.startswith("prose\n")
    assert "before" not in text
    assert "| hkvd | 0.15 | 13.5% | 40% | 0.100 (0.050 to 0.200) | 0.080 | 90.0% | 50% | 25% | +0.000 |" in text
    assert "| hkvd | 0.05 |" not in text
    assert "| mine, at 2 | 0.060 / 0.048 · 90.0% · 50% · . | 0.020 / 0.016 · 90.0%" in text
    assert "First token of a full prefill, one question: 2.00 s, 1 thread(s)." in text
    assert page.with_suffix(".svg").exists()


def test_the_first_token_of_every_setting_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    times = importlib.import_module("fidelity_times")
    write_checkpoint(tmp_path / "model", "qwen3", seed=3)
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32", block_size=16))
    sample = Sample("Who?", ("Mara",), pages(["a", "a"], ["Mara leads billing.\n\n", "She works in Bergen.\n\n"]), {})
    settings = [
        Setting("reuse", BlendConfig(mode="reuse")),
        Setting("query 0.5", BlendConfig(selector="query", ratio=0.5), "document"),
    ]
    found = times.first_tokens(engine, sample, settings, rounds=2)
    assert list(found["shares"]) == ["reuse", "query 0.5"]
    assert min(found["full_s"], *found["shares"].values()) > 0
    assert found["rounds"] == 2
    assert times.first_tokens(engine, sample, settings, rounds=9, until=0.0)["rounds"] == 1
