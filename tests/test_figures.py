"""Figures of the front page, its picture and docs/fidelity.md are those of committed results."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.measured_ratios import MEASURED_RATIOS
from cacheblend_cli.prompt.collection import kv_facts
from cacheblend_cli.types import BlendParams

ROOT = Path(__file__).parents[1]
NUMBER = r"(?<![\w.,-])(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
UNIT = r" (?:%|(?:s|ms|GB|GiB|MiB|KiB|x|times|tokens|nats|points)\b)"
FIGURE = re.compile(rf"{NUMBER}{UNIT}|(?<![\w.])\.\d+")
MODEL_15B = "qwen2.5-coder-1.5b-instruct-q4_k_m: cacheblend,"


def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def loaded(measure: str, case: str) -> float:
    """Median of a measure over whole processes with Qwen2.5-Coder-1.5B's file."""
    runs = result("benchmarks/results/peers_files.json")["machines"]["Intel(R) Xeon(R) Processor, AMX"]["runs"]
    return statistics.median(run[measure] for run in runs[f"{MODEL_15B} {case}"])


def read_per_s() -> float:
    """Median tokens per second of collecting with Qwen2.5-Coder-1.5B's file and AMX."""
    [here] = result("benchmarks/results/reading.json")["machines"].values()
    runs = here["runs"]["qwen2.5-coder-1.5b-instruct-q4_k_m"]["not limited"]["default"]
    return statistics.median(run["collect_tokens"] / run["collect_s"] for run in runs)


def to_first_character(row: str) -> float:
    """Median seconds from return, with SmolLM2."""
    machines = result("benchmarks/results/peers_start.json")["machines"]
    runs = machines["Intel(R) Xeon(R) Processor, AMX"]["runs"][f"cacheblend ask, {row}"]
    return statistics.median(run["process_first_s"] for run in runs)


def on_h100(measure: str, case: str) -> float:
    rows = result("benchmarks/results/gpu-nvidia-h100-80gb-hbm3.json")["times"]
    [row] = [r for r in rows if (r["step"], r["length"], r["case"]) == ("llama-3.1-8b", 16384, case)]
    return row[measure]


def kl(model: str, label: str) -> list[float]:
    """Mean KL over MuSiQue's questions, and its interval."""
    [row] = [r for r in result(f"study/results/{model}.json")["rows"] if r["label"] == label]
    return row["kl"]


def stored_gb(config: str) -> float:
    """GB of a million tokens of stored KV in the default codec."""
    facts = kv_facts(spec_from_config(result(f"configs/{config}.json")), "int7", torch.bfloat16, 0)
    return facts["kv_bytes_per_token"] / 1000


FIGURES: dict[str, Callable[[], float]] = {
    "1.4 s": lambda: to_first_character("cold"),
    ".22 s": lambda: to_first_character("warm"),
    "2,095 tokens": lambda: loaded("prompt_tokens", "full"),
    "4.3 s": lambda: loaded("first_s", "query .50"),
    "50 %": lambda: 100 * MEASURED_RATIOS["df64934f4e28ad785ba26d8f3d6df2f0"].ratio,
    "15 %": lambda: 100 * BlendParams().ratio,
    "1.6 s": lambda: loaded("first_s", "query .15"),
    "9.8 s": lambda: loaded("first_s", "full"),
    "549 tokens": read_per_s,
    "16,384 tokens": lambda: on_h100("length", "full"),
    "210 ms": lambda: 1000 * on_h100("seconds", "query 0.15"),
    "505 ms": lambda: 1000 * on_h100("seconds", "full"),
    ".013 nats": lambda: kl("qwen-1.5b/musique", "query, regression 0.15")[0],
    ".088": lambda: kl("qwen-1.5b/musique", "CacheBlend 0.15")[0],
    ".149": lambda: kl("qwen-1.5b/musique", "reuse")[0],
    "5.2 GB": lambda: stored_gb("qwen2.5-0.5b"),
    "54 GB": lambda: stored_gb("llama-3.1-8b"),
}
"""Of the front page, each with what it is rounded from."""


def is_rounded(shown: str, value: float) -> bool:
    number = shown.partition(" ")[0].replace(",", "")
    return round(value, len(number.partition(".")[2])) == float(number)


def figures_of_front_page() -> set[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^    .*$|`[^`]*`|\]\([^)]*\)|\[arXiv[^]]*\]", "", text, flags=re.MULTILINE)
    return set(FIGURE.findall(" ".join(prose.split())))


def test_each_figure_of_the_front_page_is_a_result() -> None:
    assert figures_of_front_page() == set(FIGURES)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_is_that_of_its_result(figure: str) -> None:
    assert is_rounded(figure, FIGURES[figure]())


def test_the_picture_shows_the_results() -> None:
    """Matplotlib writes each text of the picture as a comment, too."""
    times = result("benchmarks/results/prefill.json")["seconds"]
    shown = re.findall(r"<!-- ([\d.]+) s(?:  ([\d.]+) x sooner)? -->", (ROOT / "docs" / "faster.svg").read_text())
    cases = ("transformers", "full", "query 0.30", "query 0.15", "query 0.05", "reuse")
    assert len(shown) == len(cases)
    for case, (seconds, sooner) in zip(cases, shown, strict=True):
        assert is_rounded(seconds, times[case])
        assert not sooner or is_rounded(sooner, times["full"] / times[case])


SETTINGS = {
    "reuse, nothing recomputed": "reuse",
    "CacheBlend's selection, 15 % recomputed": "CacheBlend 0.15",
    "the default, 15 %": "query, regression 0.15",
    "the default, 30 %": "query, regression 0.3",
}


def test_the_table_of_fidelity_is_of_the_results() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    cells = {name: row for name, *row in rows}
    for setting, label in SETTINGS.items():
        for cell, model in zip(
            cells[setting], ("musique-main", "gemma/musique", "qwen/musique", "qwen-1.5b/musique"), strict=True
        ):
            values = re.findall(r"\.\d+", cell)
            assert all(is_rounded(*pair) for pair in zip(values, kl(model, label), strict=True)), (setting, model)
