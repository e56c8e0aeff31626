"""What a terminal shows: every column at any width, one line a row, and no character that drives the terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from cacheblend_cli.cli.output import Output

Cli = Callable[..., Any]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines of stdout and stderr that a terminal of that width gets from a command."""

    def call(width: int, *arguments: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "dumb")
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        result = cli(*arguments)
        assert result.code == 0, result.err
        return (result.out + result.err).splitlines()

    return call


def test_no_column_vanishes_from_a_narrow_terminal(shown: Callable[..., list[str]], stored: list[str]) -> None:
    for width in (50, 60, 120):
        listed = shown(width, "chunks", "ls")
        assert listed[0].split() == ["id", "tokens", "size", "source", "text"]
        row = next(line for line in listed if line.startswith(stored[1][:12]))
        assert "#1" in row, "the end of the source, which tells the chunks apart"
        assert "alpha" in row[listed[0].index("text") :]
        found = shown(width, "search", "alpha lead")
        assert found[0].split() == ["id", "score", "source", "snippet"]
        assert "alpha" in found[1][found[0].index("snippet") :]
        planned = shown(width, "ask", "alpha?", "--dry-run")
        assert planned[0].split() == ["chunk", "tokens", "status", "source"]
        for line in listed[:4] + found[:4] + planned[:4]:
            assert cell_len(line) <= width


@pytest.mark.parametrize("wide", ["\u8c01\u8d1f\u8d23\u8d26\u5355", "\U0001f469\U0001f44d", "ordinary"])
def test_a_table_counts_the_cells_that_characters_take(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    Output(terminal, io.StringIO()).table(
        ("source", "text", "n"), [(wide * 3, wide * 9, 7), ("a", "b", 10)], right=(2,), ends=(0,)
    )
    lines = terminal.getvalue().splitlines()
    assert len({cell_len(line) for line in lines}) == 1
    assert cell_len(lines[0]) <= 40
    assert lines[1].endswith(" 7")


def test_a_name_with_a_newline_is_one_line_on_a_terminal_and_raw_in_a_pipe(
    cli: Cli, shown: Callable[..., list[str]], docs: Path
) -> None:
    name = "two\nlines\t\x1b[31m.md"
    (docs / name).write_text("# gamma\n\nMara keeps the harbor.\n")
    (docs / "bad\nname.md").write_bytes(b"\xff\xfe")
    told = shown(200, "precompute", "docs")
    assert any("skipped docs/bad\u240aname.md" in line for line in told)
    [row] = [line for line in shown(200, "chunks", "ls") if "Mara keeps" in line]
    assert "docs/two\u240alines\u2409\u241b[31m.md#0" in row
    assert not any("\x1b" in line for line in shown(200, "search", "gamma"))
    [answer] = [
        line
        for line in shown(200, "ask", "gamma harbor?", "--top-k", "1", "--max-tokens", "2")
        if "source: docs/two" in line
    ]
    assert "source: docs/two\u240alines\u2409\u241b[31m.md, " in answer
    chunk = row.split()[0]
    assert any(line.startswith("source") and "two\u240alines" in line for line in shown(200, "chunks", "show", chunk))


def test_json_drives_no_terminal(shown: Callable[..., list[str]], cli: Cli, docs: Path) -> None:
    """JSON escapes ESC itself, but neither U+009B, which begins a sequence as ESC [ does, nor changes of direction."""
    name = "two\x1b[1m\u009b31m\u202e\x7f.md"
    (docs / name).write_text(f"# gamma\n\nMara keeps the harbor {name}.\n")
    raw = cli("precompute", "docs", "--json").records
    for command in (("chunks", "ls"), ("search", "gamma harbor"), ("ask", "harbor?", "--max-tokens", "1")):
        lines = shown(80, *command, "--json")
        assert not {"\x1b", "\u009b", "\u202e", "\x7f"} & set("".join(lines)), command
    assert f"docs/{name}" in {record["source"] for record in raw}
    found = [json.loads(line) for line in shown(80, "chunks", "ls", "--json") if line.startswith("{")]
    assert f"docs/{name}" in {record["source"] for record in found}


def test_a_pipe_gets_names_raw(cli: Cli, docs: Path) -> None:
    (docs / "two\nlines.md").write_text("# gamma\n\nMara keeps the harbor.\n")
    assert cli("precompute", "docs").code == 0
    assert "docs/two\nlines.md#0" in cli("search", "gamma").out
    assert cli("search", "gamma", "--json").records[0]["source"] == "docs/two\nlines.md"


def test_long_work_says_a_line_a_minute_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("cacheblend_cli.cli.output.time.monotonic", lambda: clock[0])
    err = io.StringIO()
    with Output(io.StringIO(), err).progress("precompute") as update:
        for second in range(150):
            clock[0] = float(second)
            update(second, 200, f"{second} tokens/s")
    assert err.getvalue().splitlines() == ["precompute 30%, 60 tokens/s", "precompute 60%, 120 tokens/s"]


def test_a_status_is_gone_when_there_is_more_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal; it is cut to one line, which can be erased. Elsewhere there is none."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    err, plain = Terminal(), io.StringIO()
    output = Output(io.StringIO(), err)
    output.status("loading " + "x" * 50)
    Output(io.StringIO(), err).note("done")
    assert err.getvalue() == "loading " + "x" * 11 + "\r\x1b[2Kdone\n"
    Output(io.StringIO(), plain).status("loading")
    assert plain.getvalue() == ""


def test_a_status_does_not_erase_the_beginning_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    output = Output(screen, screen)
    output.status("loading")
    output.text("Mara", end="")
    output.status("measuring")
    output.text(" leads billing.")
    assert "loading" in screen.getvalue()
    assert screen.getvalue().rpartition("\r\x1b[2K")[2] == "Mara leads billing.\n"
    output.status("saving")
    assert screen.getvalue().endswith("saving\x1b[0m")
    output.end_status()


def test_a_terminal_shows_what_is_computed_before_and_after_the_answer(
    cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("ask", "who leads?", "--chunks", ",".join(stored), "--max-tokens", "4")
    assert "reading" not in cli(*asked, "--verify").err  # in a pipe
    monkeypatch.setenv("TERM", "xterm")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    shown = cli(*asked, "--mode", "full", "--verify")
    before, _, after = shown.err.partition("comparing with a full prefill (")
    assert f"reading {len(stored)} passages (" in before
    assert re.search(r"tokens\): \d+%", after)
