"""cacheblend chat: turns on a pipe, with an engine and without, and the commands that look at them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, CommandResult

from cacheblend_cli.cli.ask_session import AskSession
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams


@pytest.fixture
def chat(cli: Cli) -> Callable[..., CommandResult]:
    """Lines typed into a chat."""
    return lambda *lines, flags=(): cli("chat", *flags, stdin="\n".join([*lines, ""]))


def test_turns_are_the_same_with_an_engine_and_without(chat: Any, start: Any) -> None:
    lines = ("who leads billing? Jonas", "where does Mara work?")
    cold = chat(*lines, flags=("-v",))
    server = start()
    warm = chat(*lines, flags=("-v",))
    assert cold[:2] == warm[:2]
    assert (cold[2].count("by the engine"), warm[2].count("by the engine")) == (0, 2)
    assert server.state.engine.service.stats().finished == 2
    assert chat(*lines, flags=("--local",))[1] == cold[1]


def test_a_question_goes_behind_what_was_said(chat: Any, engine: Engine) -> None:
    code, out, _ = chat("who?", "where?", flags=("--chunks", ""))
    sampling = SamplingParams(max_tokens=6, reasoning_tokens=1024)
    first = engine.run_alone(None, AskRequest("who?", (), BlendParams(), sampling))
    second = engine.run_alone(None, AskRequest("where?", (), BlendParams(), sampling, history=("who?", first.text)))
    assert (code, out) == (0, f"{first.text}\n{second.text}\n")


def test_a_follow_up_finds_what_the_question_before_it_was_about(chat: Any, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "docs" / "lease.md").write_text("# Harbor house\n\nThe lease of the harbor house ends in May.\n")
    (tmp_path / "docs" / "club.md").write_text("# Chess\n\nThe season ends in June.\n")
    assert cli("precompute", "docs").code == 0
    alone = chat("And when does it end?", flags=("-k", "1"))
    turns = chat("Who owns the harbor house?", "And when does it end?", flags=("-k", "1"))
    assert "source: docs/club.md" in alone.err
    assert turns.err.count("source: docs/lease.md") == 2
    assert len(re.findall(r"^\d+\.\d s[:,] ", turns.err, re.MULTILINE)) == 2


def test_commands(chat: Any, tmp_path: Path) -> None:
    code, out, err = chat(
        "/why",
        "who leads billing? Jonas",
        "/sources",
        "/why",
        "/docs",
        "/save a.json",
        "/save a.json",
        "/save",
        "/x",
        "/help",
        "/quit",
        "never",
    )
    assert code == 2  # of what could not be done
    assert "/x" in err
    assert err.count("/save") >= 1
    lines = out.splitlines()
    assert sum("docs/0.md" in line for line in lines) == 3
    assert any(line.startswith("chunk ") and " tokens" in line for line in lines)
    assert any(line.startswith("/sources") for line in lines)
    [turn] = json.loads((tmp_path / "a.json").read_text())
    assert turn["question"] == "who leads billing? Jonas"
    assert turn["answer"] in out


def test_a_long_conversation_forgets_its_beginning(chat: Any, start: Any) -> None:
    long = "Mara works in Bergen " * 60
    for _ in range(2):
        code, out, err = chat(long, long, long, "who?", flags=("--chunks", ""))
        assert (code, len(out.splitlines()) >= 4) == (0, True)
        assert "first turn" in err
        start()
    code, _, err = chat(long * 20, "who?", flags=("--chunks", ""))
    assert code == 2
    assert "context" in err


def test_a_chat_ends_when_a_rank_is_lost(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def lost(self: AskSession, *given: Any) -> None:
        asked.append(given)
        raise DeviceError("rank 1 was lost")

    monkeypatch.setattr(AskSession, "ask", lost)
    monkeypatch.setattr(AskSession, "is_lost", True)
    assert chat("who leads billing?", "and where?")[0] == 5
    assert len(asked) == 1
