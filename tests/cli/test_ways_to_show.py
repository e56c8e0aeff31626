"""An answer is shown whole, whichever way it is shown and whether or not it may be held back until it is checked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli

QUESTION = "alpha"
HELD = {
    "at once": (),
    "confirmed": ("--confirm",),
    "confirmed if marked": ("--confirm", "marked"),
    "confirmed if marked, by the setting's flag": ("--on-unsupported", "confirm"),
    "refused if marked": ("--on-unsupported", "refuse"),
    "refused if marked, and compared": ("--verify", "--on-unsupported", "refuse"),
}


def show_pipe(cli: Cli, asked: tuple[str, ...]) -> str:
    return cli("ask", QUESTION, *asked).out


def show_quiet(cli: Cli, asked: tuple[str, ...]) -> str:
    return cli("ask", QUESTION, *asked, "-q").out


def show_json(cli: Cli, asked: tuple[str, ...]) -> str:
    [record] = cli("ask", QUESTION, *asked, "--json").records
    return f"{record['answer']}\n"


def show_batch(cli: Cli, asked: tuple[str, ...]) -> str:
    [record] = cli("ask", "--batch", "-", *asked, stdin=json.dumps({"question": QUESTION})).records
    return f"{record['answer']}\n"


def show_html(cli: Cli, asked: tuple[str, ...]) -> str:
    shown, err = cli("ask", QUESTION, *asked, "--html", "answer.html")[1:]
    assert "wrote answer.html" in err
    found = re.search(r'<div class="answer">(.*?)</div>', Path("answer.html").read_text(encoding="utf-8"), re.DOTALL)
    assert found
    assert found[1] == shown.strip()
    return shown


def show_chat(cli: Cli, asked: tuple[str, ...]) -> str:
    return cli("chat", *asked, stdin=f"{QUESTION}\n").out


def on_terminal(show: Callable[[Cli, tuple[str, ...]], str]) -> Callable[[Cli, tuple[str, ...]], str]:
    def shown(cli: Cli, asked: tuple[str, ...]) -> str:
        with pytest.MonkeyPatch.context() as patch:
            for stream in (sys.stdout, sys.stderr):
                patch.setattr(stream, "isatty", lambda: True)
            return show(cli, asked)

    return shown


def show_batch_text(cli: Cli, asked: tuple[str, ...]) -> str:
    return cli("ask", "--batch", "-", *asked, stdin=json.dumps({"question": QUESTION})).out


WAYS = {
    "pipe": show_pipe,
    "quiet": show_quiet,
    "json": show_json,
    "batch": show_batch,
    "html": show_html,
    "chat": show_chat,
    "terminal": on_terminal(show_pipe),
    "batch on a terminal": on_terminal(show_batch_text),
    "chat on a terminal": on_terminal(show_chat),
}


ASKS_MARKED = ("--regex", "Jonas Borg keeps 4 parrots")  # names and figures that no page has


@pytest.fixture
def settings(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "reuse", "MAX_TOKENS": "40", "TOP_K": "2"}.items():
        monkeypatch.setenv(f"CACHEBLEND_{name}", value)
    assert cli("precompute", "docs", "--chunk-tokens", "40", "-q").code == 0


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_shown_whole(cli: Cli, settings: None, way: str, held: str) -> None:
    if "chat" in way and {"--confirm", "--verify"} & set(HELD[held]):
        return  # no flags of chat
    for form in ((),) if "chat" in way or "refuse" in HELD[held] else ((), ASKS_MARKED):  # which take no form
        asked = (*HELD[held], *form)
        answer = show_json(cli, asked)
        assert answer.strip()
        assert WAYS[way](cli, asked) == answer


@pytest.mark.parametrize("way", WAYS)
def test_the_setting_holds_back_as_the_flag_does(
    cli: Cli, settings: None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = show_json(cli, HELD["confirmed if marked"])
    monkeypatch.setenv("CACHEBLEND_ON_UNSUPPORTED", "confirm")
    assert WAYS[way](cli, ()) == answer
