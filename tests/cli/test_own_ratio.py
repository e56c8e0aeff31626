"""`models check` measures the ratio a model needs, and `--ratio model` uses it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import WORDS

from cacheblend_cli import user_cache
from cacheblend_cli.evaluation import profile
from cacheblend_cli.model.description import weights_digest
from cacheblend_cli.model.measured_ratios import MEASURED_RATIOS, MeasuredRatio

Cli = Callable[..., Any]
CHECK = ("models", "check", "--ratio-only", "--json")


@pytest.fixture
def chunks(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ids of two of the stored chunks, in the form of --chunks."""
    monkeypatch.setattr(profile, "PROMPTS", 8)
    monkeypatch.setenv("CACHEBLEND_CONTEXT", "sink")
    (tmp_path / "docs").mkdir()
    for d in range(10):
        words = " ".join(WORDS[(d + w) % len(WORDS)] for w in range(12))
        (tmp_path / "docs" / f"{d}.txt").write_text(f"Number {d} of all: {words}.\n")
    stored = cli("precompute", "docs", "--chunk-tokens", "60", "--json")
    assert stored.code == 0, stored.err
    return ",".join(record["id"] for record in stored.records[:2])


def asked(cli: Cli, chunks: str, *flags: str) -> dict[str, Any]:
    told = cli("ask", "who?", "--chunks", chunks, "--ratio", "model", "--max-tokens", "2", "--json", *flags)
    assert told.code == 0, told.err
    record: dict[str, Any] = told.records[0]
    return record


def profiles() -> list[Path]:
    folder = user_cache.folder("profiles")
    return list(folder.iterdir()) if folder.is_dir() else []


def test_the_smallest_ratio_that_is_close_enough_is_used(cli: Cli, model: Path, chunks: str) -> None:
    before = asked(cli, chunks)
    assert (before["ratio"], before["ratio_from"]) == (0.15, "default: models check was not run for this model")
    assert not any("ratio" in note for note in before["notes"]), "that is how it is for most users"
    told = cli(*CHECK, str(model), "--kl-mean", "1000")
    assert told.code == 0, told.err
    assert "measuring" in told.err
    assert "Ctrl-C keeps nothing" in told.err
    [measured] = [record["profile"] for record in told.records]
    assert (measured["ratio"], measured["prompts"], len(measured["measured"])) == (0.05, 8, 2)
    assert len(profiles()) == 1
    found = asked(cli, chunks)
    assert found["ratio"] == 0.05
    assert found["ratio_from"].startswith("model: ")
    assert "over 8 prompts" in found["ratio_from"]
    given = asked(cli, chunks, "--ratio", "0.3")
    assert (given["ratio"], given["ratio_from"]) == (0.3, "given")
    told = cli("ask", "who?", "--chunks", chunks, "--ratio", "model", "--max-tokens", "2", "--explain")
    assert "ratio 0.05, model: " in told.err
    assert "0.05 in float32 with KV in float32" in cli("models", "show", str(model)).out
    assert "0.05, model: " in cli("doctor", "--json", "--ratio", "model").records[0]["model"]["ratio"]


def test_where_nothing_is_close_enough_all_that_needs_repair_is_computed(cli: Cli, model: Path, chunks: str) -> None:
    told = cli("models", "check", str(model), "--ratio-only", "--kl-mean", "0")
    assert told.code == 0, told.err
    assert told.out.count("KL mean") == 10
    assert "no ratio is close enough" in told.out
    found = asked(cli, chunks)
    assert (found["selector"], found["ratio"]) == ("all", 1.0)
    assert [chunk["recomputed"] for chunk in found["chunks"]] == [0, found["chunks"][1]["tokens"]], (
        "what is exact is used"
    )
    assert found["answer"] == asked(cli, chunks, "--mode", "full")["answer"]
    assert any("no ratio close enough" in note for note in found["notes"])
    low = asked(cli, chunks, "--ratio", "0.3")
    assert low["mode"] == "blend"
    assert any("far from a full prefill: use mode full" in note for note in low["notes"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt", "prompt.txt"), "another prompt"),
        ((), "KV dtype float32, not int4"),
        (("--dtype", "bfloat16"), "dtype float32, not bfloat16"),
        (("--selector", "hkvd"), "selector query, not hkvd"),
    ],
)
def test_a_profile_of_something_else_is_not_used(
    cli: Cli,
    model: Path,
    chunks: str,
    tmp_path: Path,
    flags: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli(*CHECK, str(model), "--kl-mean", "1000").code == 0
    if not flags:
        monkeypatch.setenv("CACHEBLEND_KV_DTYPE", "int4")
    (tmp_path / "prompt.txt").write_text("{chunks} Tell me: {question}")
    if "--prompt" not in flags and "--selector" not in flags:
        stored = cli("precompute", "docs", "--chunk-tokens", "60", *flags, "--yes", "--json")
        chunks = ",".join(record["id"] for record in stored.records[:2])
    found = asked(cli, chunks, *flags)
    assert found["ratio"] == 0.15
    assert words in found["ratio_from"]
    assert [words in note for note in found["notes"] if "ratio" in note] == [True]


@pytest.mark.parametrize(
    ("flags", "ratio"),
    [((), 0.3), (("--prompt", "prompt.txt"), 0.3), (("--selector", "hkvd"), 0.15)],
)
def test_a_published_model_has_the_ratio_of_the_table(
    cli: Cli,
    model: Path,
    chunks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    ratio: float,
) -> None:
    monkeypatch.setitem(MEASURED_RATIOS, weights_digest(model), MeasuredRatio("m.gguf", 0.3, 0.01, 0.02))
    (tmp_path / "prompt.txt").write_text("{chunks} Tell me: {question}")
    found = asked(cli, chunks, *flags)
    assert (found["ratio"], found["ratio_from"].startswith("model: measured for this model")) == (ratio, ratio == 0.3)


def test_the_table_is_for_kv_near_the_computed_and_a_profile_comes_before_it(
    cli: Cli, model: Path, chunks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEASURED_RATIOS, weights_digest(model), MeasuredRatio("m.gguf", 0.3, 0.01, 0.02))
    assert "0.3, measured for this model" in cli("models", "show", str(model)).out
    for codec, ratio in (("int7", 0.3), ("int4", 0.15)):
        monkeypatch.setenv("CACHEBLEND_KV_DTYPE", codec)
        stored = cli("precompute", "docs", "--chunk-tokens", "60", "--yes", "--json", "--force")
        assert asked(cli, ",".join(record["id"] for record in stored.records[:2]))["ratio"] == ratio
    monkeypatch.delenv("CACHEBLEND_KV_DTYPE")
    assert cli("precompute", "docs", "--chunk-tokens", "60", "--yes").code == 0
    assert cli(*CHECK, str(model), "--kl-mean", "1000").code == 0
    assert asked(cli, chunks)["ratio"] == 0.05


def test_a_ratio_below_the_profiles_is_noted(cli: Cli, model: Path, chunks: str) -> None:
    assert cli(*CHECK, str(model), "--kl-mean", "1000").code == 0
    assert any("needs a ratio of 0.05" in note for note in asked(cli, chunks, "--ratio", "0.01")["notes"])
    assert asked(cli, chunks, "--ratio", "0.05")["notes"] == []
    assert asked(cli, chunks.split(",")[0], "--ratio", "0.01")["notes"] == [], "one chunk is exact"


@pytest.mark.usefixtures("chunks")
def test_an_interruption_keeps_nothing(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "distance", interrupted)
    told = cli(*CHECK, str(model))
    assert (told.code, "the ratio was not stored" in told.err) == (130, True)
    assert profiles() == []


def test_nothing_stored_or_too_little_keeps_nothing(cli: Cli, model: Path, docs: Path) -> None:
    refused = cli(*CHECK, str(model))
    assert refused.code == 3
    assert "cacheblend precompute" in refused.err
    assert cli("precompute", str(docs)).code == 0
    refused = cli(*CHECK, str(model))
    assert (refused.code, "too few chunks" in refused.err) == (3, True)
    assert profiles() == []


def test_eval_and_bench_take_it(cli: Cli, model: Path, chunks: str, tmp_path: Path) -> None:
    assert cli(*CHECK, str(model), "--kl-mean", "1000").code == 0
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "ctxs": [{"text": "a b c d e"}, {"text": "b c d e f"}]}\n')
    told = cli(
        "eval", "q.jsonl", "--ratio", "model", "--mode", "blend", "--no-noise-floor", "--max-tokens", "2", "--json"
    )
    assert told.code == 0, told.err
    assert "query 0.05" in told.out


def test_an_unmeasured_ratio_is_said_once_on_a_terminal(
    cli: Cli, model: Path, chunks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggested = f"models check {model} --ratio-only"
    question = ("ask", "who?", "--max-tokens", "2", "--chunks")
    assert suggested not in cli(*question, chunks).err, "not in a pipe"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for flags in (("-q",), ("--json",), ("--ratio", "0.15"), ("--mode", "full"), ("--mode", "reuse")):
        assert suggested not in cli(*question, chunks, *flags).err
    assert suggested not in cli(*question, chunks.split(",")[0]).err, "one chunk needs no repair"
    assert cli(*question, chunks).err.count(suggested) == 1
    assert suggested not in cli(*question, chunks).err
