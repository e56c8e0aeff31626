"""cacheblend eval: from data to table, JSON lines, records and picture."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.cli.eval import show_scores
from cacheblend_cli.cli.output import Output
from cacheblend_cli.evaluation.evaluate import FULL, Results
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.summary import summarise
from cacheblend_cli.extras import install_hint

Cli = Callable[..., Any]

A, B, C = "the lead of billing is Mara ", "she works in Bergen ", "Jonas keeps a parrot at home near the harbor "
ROWS: list[dict[str, Any]] = [
    {
        "question": "who leads billing",
        "answers": ["Mara"],
        "ctxs": [{"title": "a", "text": A}, {"title": "a", "text": B}, {"title": "b", "text": C}],
    },
    {
        "question": "who keeps a parrot",
        "answers": [["Jonas"]],
        "ctxs": [{"title": "b", "text": C}, {"title": "a", "text": A}],
    },
]
SHORT = ("--max-tokens", "6")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_every_combination_once_with_full_prefill_and_the_noise_floor(cli: Cli, data: str) -> None:
    result = cli(
        "eval", data, "--selector", "first", "--selector", "none", "--ratio", "0.3", "--ratio", "1", "--json", *SHORT
    )
    assert result.code == 0, result.err
    found = {r["label"]: r for r in result.records}
    assert list(found) == ["full prefill", "reuse", "first 0.3", "first 1", "none", "noise floor"]
    assert {r["samples"] for r in found.values()} == {2}
    assert found["first 1"]["kl"]["value"] < 1e-6 < found["reuse"]["kl"]["value"]
    assert found["none"]["kl"]["value"] == found["reuse"]["kl"]["value"]
    assert found["first 1"]["norm_f1"] is None or found["first 1"]["norm_f1"]["value"] == 1
    assert (
        found["reuse"]["budget"] == 0 < found["first 0.3"]["budget"] < found["first 1"]["budget"] < 1
    )  # exact chunks need nothing
    assert len(found["reuse"]["k_error"]) == 4
    assert found["full prefill"]["kl"] is None


def test_the_table_and_the_layers_are_plain_text_in_a_pipe(cli: Cli, data: str) -> None:
    result = cli("eval", data, "--layers", "--no-noise-floor", *SHORT)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split()[:5] == ["setting", "has", "answer", "F1", "NormF1"]
    assert [line.split()[0] for line in lines[1:4]] == ["full", "reuse", "query"]
    assert "relative RMSE against full prefill, by layer:" in lines
    assert "\x1b" not in result.out
    assert "2 questions" in result.err


def test_settings_of_ask_apply(cli: Cli, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RATIO", "0.4")
    monkeypatch.setenv("CACHEBLEND_SELECTOR", "random")
    monkeypatch.setenv("CACHEBLEND_CORRECTION", "none")
    records = cli("eval", data, "--json", "--mode", "blend", *SHORT).records
    assert [r["label"] for r in records] == ["full prefill", "random 0.4", "noise floor"]
    assert records[1]["setting"]["correction"] == "none"
    assert records[1]["setting"]["checks"] == []
    assert 0.3 < records[1]["recomputed"] < 0.5


def test_contexts_are_told_apart(cli: Cli, data: str) -> None:
    records = cli(
        "eval", data, "--json", "--mode", "reuse", "--context", "sink", "--context", "document", *SHORT
    ).records
    sink, document = records[1:3]
    assert (sink["label"], document["label"]) == ("reuse, sink", "reuse, document")
    assert document["kl"]["value"] != sink["kl"]["value"]


def test_chunks_by_number_without_answers(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(
        json.dumps({"0": A, "1": B, "2": C, "chunk_num": 3, "query": "\n\nwho?"}, indent=1)
    )
    (tmp_path / "2.json").write_text(json.dumps({"0": C, "1": A, "chunk_num": 2, "query": "where?"}))
    result = cli("eval", "1.json", "2.json", *SHORT)
    assert result.code == 0
    assert result.out.splitlines()[0].split()[:3] == ["setting", "F1", "to"]
    [full, reuse, _] = cli("eval", "1.json", "2.json", "--json", "--no-noise-floor", *SHORT).records
    assert full["samples"] == 2
    assert full["f1"] is reuse["f1"] is None
    assert reuse["f1_full"] is not None
    assert cli("eval", "1.json", "2.json", "--json", "--limit", "1", *SHORT).records[0]["samples"] == 1


def test_a_run_is_resumed_and_not_overwritten(cli: Cli, data: str, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    first = cli("eval", data, "--limit", "1", "--out", str(records), *SHORT)
    assert first.code == 0
    assert str(records) in first.err
    written = records.read_bytes()
    refused = cli("eval", data, "--out", str(records), *SHORT)
    assert refused.code == 2
    assert f"--resume {records}" in refused.err
    assert records.read_bytes() == written
    assert cli("eval", data, "--resume", str(records), *SHORT).code == 0
    assert len(records.read_text().splitlines()) == 8
    assert records.read_bytes().startswith(written)
    assert {json.loads(line)["label"] for line in records.read_text().splitlines()} == {
        "full prefill", "reuse", "query 0.15", "noise floor",
    }  # fmt: skip
    assert cli("eval", data, "--out", "a", "--resume", "b").code == 2


def test_a_float8_pool_is_another_run(cli: Cli, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("eval", data, "--out", "r.jsonl", *SHORT).code == 0
    monkeypatch.setenv("CACHEBLEND_KV_POOL_DTYPE", "float8_e4m3")
    assert cli("eval", data, "--resume", "r.jsonl", *SHORT).code == 0
    assert len(Path("r.jsonl").read_text().splitlines()) == 16


def test_the_store_is_a_temporary_one_unless_named(cli: Cli, data: str, tmp_path: Path) -> None:
    assert cli("eval", data, *SHORT).code == 0
    assert not (tmp_path / "store").exists()
    assert cli("eval", data, "--store", "kept", *SHORT).code == 0
    assert len(cli("chunks", "ls", "--json", "--store", "kept").records) == 3


@pytest.mark.parametrize(("suffix", "answers"), [("png", True), ("svg", False)])
def test_a_picture_of_quality_and_time(cli: Cli, tmp_path: Path, suffix: str, answers: bool) -> None:
    rows = ROWS if answers else [{k: v for k, v in row.items() if k != "answers"} for row in ROWS]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    result = cli("eval", "data.json", "--ratio", "0.2", "--ratio", "0.8", "--plot", f"p.{suffix}", *SHORT)
    assert result.code == 0, result.err
    picture = (tmp_path / f"p.{suffix}").read_bytes()
    if suffix == "png":
        assert picture.startswith(b"\x89PNG")
    else:
        assert b"</svg>" in picture


def test_what_cannot_be_drawn_is_said_before_anything_is_measured(
    cli: Cli, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (("p.gif", "p.gif"), ("nowhere/p.png", "nowhere")):
        result = cli("eval", data, "--plot", name)
        assert (result.code, result.out) == (2, "")
        assert said in result.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli("eval", data, "--plot", "p.png")
    assert result.code == 2
    assert install_hint("plot") in result.err


def test_a_picture_that_cannot_be_written_costs_no_measurement(cli: Cli, data: str, tmp_path: Path) -> None:
    (tmp_path / "p.svg").mkdir()
    result = cli("eval", data, "--plot", "p.svg", *SHORT)
    assert result.code == 2
    assert [line.split()[0] for line in result.out.splitlines()] == ["setting", "full", "reuse", "query", "noise"]
    assert "p.svg" in result.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--mode", "x"), 2, "'x'"),
        (("--selector", "x"), 2, "'x'"),
        (("--context", "x"), 2, "'x'"),
        (("--ratio", "1.5"), 2, "--ratio 1.5"),
        (("gone.json",), 3, "gone.json"),
    ],
)
def test_bad_flags(cli: Cli, data: str, flags: tuple[str, ...], code: int, said: str) -> None:
    result = cli("eval", data, *flags)
    assert (result.code, result.out) == (code, "")
    assert said in result.err


def test_stdin_and_bad_lines(cli: Cli) -> None:
    good = cli("eval", "-", "--json", *SHORT, stdin=json.dumps(ROWS))
    assert good.code == 0
    bad = cli("eval", "-", stdin=json.dumps(ROWS[0]) + "\n{}\n")
    assert bad.code == 2
    assert "stdin:2" in bad.err


def test_questions_too_long_are_left_out_by_number(cli: Cli, tmp_path: Path) -> None:
    long = {**ROWS[0], "ctxs": [{"text": A * 400}]}
    (tmp_path / "data.json").write_text(json.dumps([long, ROWS[1]]))
    result = cli("eval", "data.json", "--json", *SHORT)
    assert result.code == 0
    assert "question 1 " in result.err
    assert result.records[0]["samples"] == 1
    (tmp_path / "data.json").write_text(json.dumps([long]))
    assert cli("eval", "data.json").code == 2


def test_a_narrow_terminal_gets_several_tables_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    record = Record("k", "l", "s", "a", 9, 8, 0, 8, 1.0, 0.1234, 0.1, exact_match=True, f1=0.75, rouge_l=0.5)
    reuse = Setting("reuse", FULL.blend.__class__(mode="reuse"))
    ours = Record(
        "k", "l", "s", "a", 9, 8, 0, 0, 0.0, 0.0456, 0.1, (0.5,), (True,), (1.0,), (1.0,), (1.0,), True, 1.0, 1.0,
        True, 0.25, 0.5,
    )  # fmt: skip
    summaries = summarise(Results([FULL, reuse], {"full prefill": [record], "reuse": [ours]}), resamples=10)
    terminal = Terminal()
    show_scores(summaries, Output(terminal, io.StringIO()))
    shown = terminal.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= 60
    for cell in ("0.750", "0.250", "45.6 ms", "123.4 ms", "first token"):
        assert cell in shown
    assert shown.count("full prefill") == shown.count("setting") > 1


def test_a_question_without_contexts_gets_those_that_ask_finds(cli: Cli, docs: Path, tmp_path: Path) -> None:
    assert cli("precompute", "docs", "--chunk-tokens", "40").code == 0
    (tmp_path / "own.jsonl").write_text('{"question": "alpha?"}\n')
    planned = cli("ask", "alpha?", "-k", "2", "--dry-run", "--json").records[0]
    result = cli("eval", "own.jsonl", "-k", "2", "--json", "--out", "r", *SHORT)
    assert result.code == 0, result.err
    assert {r["samples"] for r in result.records} == {1}
    reuse = next(r for r in result.records if r["label"] == "reuse")
    assert reuse["kl"] is not None
    records = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert len(planned["chunks"]) == 2
    assert records


def test_a_question_without_contexts_needs_a_store(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"question": "alpha?"}\n')
    assert cli("eval", "own.jsonl").code == 3
