"""Help and shell completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.cli import completion
from cacheblend_cli.cli.app import COMMANDS
from cacheblend_cli.cli.flags import ASK
from cacheblend_cli.settings import Settings

Cli = Callable[..., Any]


@pytest.mark.parametrize("command", ["ask", "precompute", "chat", "serve", "eval"])
def test_help_shows_common_options_and_help_all_every_option_once(cli: Cli, command: str) -> None:
    short, full = cli(command, "--help").out, cli(command, "--help-all").out
    common, flags = (
        re.findall(r"^  (--[a-z-]+)", text.partition("\nOptions:\n")[2], re.MULTILINE) for text in (short, full)
    )
    assert len(flags) == len(set(flags))
    assert {"--model", "--help-all"} <= set(common) < set(flags)
    assert "--dtype" not in short


def test_ask_help_all_has_every_setting_that_ask_takes(cli: Cli) -> None:
    text = cli("ask", "--help-all").out
    for name in ASK:
        assert f"--{name.replace('_', '-')} " in text


@pytest.mark.parametrize(("command", "most", "most_shown"), [("ask", 48, 24), ("chat", 45, 24), ("serve", 60, 40)])
def test_a_command_has_few_options(cli: Cli, command: str, most: int, most_shown: int) -> None:
    short, full = (re.findall(r"^  -", cli(command, flag).out, re.MULTILINE) for flag in ("--help", "--help-all"))
    assert len(full) <= most
    assert len(short) <= most_shown


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ("ask q --swap-space 4", "config set swap_space VALUE, or cacheblend serve --swap-space VALUE"),
        ("chat --threads=2", "config set threads VALUE, or cacheblend serve --threads VALUE"),
        ("search q --eager", "config set eager true, or cacheblend serve --eager"),
        ("ask --check-layer 2 q", "config set check_layer VALUE, or cacheblend eval --check-layer VALUE"),
        ("chat --context sink", "config set context VALUE, or cacheblend precompute --context VALUE"),
        ("serve --seed 1", "config set seed VALUE, or cacheblend ask --seed VALUE"),
        ("chunks ls --seed 1", "config set seed VALUE, or cacheblend ask --seed VALUE"),
        ("ask q --repetition-penalty", "config set repetition_penalty VALUE"),
        ("ask q --no-stop-repetition", "config set stop_repetition false"),
    ],
)
def test_a_flag_that_moved_says_where_it_is(cli: Cli, arguments: str, instead: str) -> None:
    result, [flag] = cli(*arguments.split()), re.findall(r"--[a-z-]+", arguments)
    assert (result.code, result.err.splitlines()[1]) == (2, f"hint: cacheblend {instead}")
    assert result.err.startswith(f"error: {flag} is a setting")


def test_settings_can_be_set_where_a_moved_flag_says(cli: Cli) -> None:
    for name in {f.name for f in fields(Settings)} - {*ASK, "force_store"}:
        flag = f"--{name.replace('_', '-')}"
        instead = cli("ask", "q", flag).err.partition(", or cacheblend ")[2].split()
        assert not instead or flag in cli(instead[0], "--help-all").out, name


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_a_default_in_words_has_its_brackets(cli: Cli, command: str) -> None:
    text = cli(command, "--help-all").out
    assert [text.count(c) for c in "(["] == [text.count(c) for c in ")]"]


def test_help_and_version_are_words_too(cli: Cli) -> None:
    for words, flags in (
        (["help"], ["--help"]),
        (["help", "ask"], ["ask", "--help"]),
        (["help", "chunks", "ls"], ["chunks", "ls", "--help"]),
        (["version"], ["--version"]),
        (["version", "--jsn"], ["--version", "--jsn"]),
    ):
        assert cli(*words) == cli(*flags)
    assert cli("help", "serach").code == 2


def test_every_summary_of_a_command_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("--help").out.splitlines()
    assert all(any(line.split() == [name, *text.split()] for line in lines) for name, (_, text) in COMMANDS.items())


@pytest.mark.parametrize("group", ["chunks", "models", "config"])
def test_no_summary_of_a_subcommand_is_cut(cli: Cli, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, found, summaries = cli(group, "--help").out.partition("Commands:")
    assert found
    assert "..." not in summaries


def test_a_misspelt_command_is_a_usage_error_with_a_suggestion(cli: Cli) -> None:
    result = cli("serach")
    assert result.code == 2
    assert "search" in result.err


def test_ids_documents_and_models_are_completed(cli: Cli, stored: list[str]) -> None:
    assert sorted(completion.chunk_ids("")) == sorted(name[:12] for name in stored)
    assert completion.chunk_ids(f"{stored[0]},{stored[1][:3]}")[0].startswith(f"{stored[0]},{stored[1][:3]}")
    assert completion.sources("docs/a") == ["docs/alpha.md"]
    assert "handbook" in completion.models("hand")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ask --mode b", ["blend"]),
        ("search x --search m", ["meaning"]),
        ("config set max_t", ["max_tokens"]),
        ("config set kv-dtype exa", ["exact"]),
        ("config set ratio ", []),
    ],
)
def test_settings_are_completed(words: str, completed: list[str]) -> None:
    """By the variables of a shell."""
    count = len(f"{words}.".split())
    env = os.environ | {
        "_CACHEBLEND_COMPLETE": "complete_bash",
        "COMP_WORDS": f"cacheblend {words}",
        "COMP_CWORD": str(count),
    }
    code = "from cacheblend_cli.cli.app import app; app(prog_name='cacheblend')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


@pytest.mark.parametrize(
    ("words", "hint"), [(("ingest", "docs"), "precompute"), (("query", "who?"), "ask"), (("list",), "chunks ls")]
)
def test_names_of_other_tools_are_guessed(cli: Cli, words: tuple[str, ...], hint: str) -> None:
    result = cli(*words)
    assert result.code == 2
    assert f"did you mean {hint}?" in result.err


def test_completion_without_a_store_is_silent(cli: Cli) -> None:
    assert completion.chunk_ids("") == completion.sources("") == []


@pytest.mark.parametrize(
    ("shell", "variables"),
    [
        ("bash", {"COMP_WORDS": "cacheblend ask --source ", "COMP_CWORD": "3"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "cacheblend ask --source "}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "cacheblend ask --source ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_a_shell_is_told_and_nothing_heavy_is_imported(
    stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, variables: dict[str, str]
) -> None:
    code = (
        "import sys, atexit; from cacheblend_cli.cli.main import main; heavy = ('torch', 'numpy', 'transformers')\n"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr)); main()"
    )
    for name, value in {"_CACHEBLEND_COMPLETE": f"complete_{shell}", **variables}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "docs/alpha.md" in done.stdout
    assert done.stderr.endswith("[]\n")


@pytest.mark.parametrize(("given", "meant"), [("--stroe", "--store"), ("--max-token", "--max-tokens")])
def test_an_unknown_option_is_answered_with_the_most_similar(given: str, meant: str, cli: Cli) -> None:
    result = cli("ask", given, "x")
    assert result.code == 2
    assert result.err.splitlines() == [
        f"error: no such option: {given}",
        f"hint: did you mean {meant}? see: cacheblend ask --help",
    ]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("ask q --seed x", "--seed: random seed of sampling"),
        ("ask q --concurrency 0", "--concurrency: questions of --batch to answer at the same time"),
        ("ask q --ratio x", "for example --ratio 0.15"),
        ("ask q --top-k 0", "for example --top-k 5"),
        ("ask q --max-tokens 0", "correct the value, or leave it out"),
        ("ask q --temperature", "write a value after it: --temperature VALUE"),
        ("ask q --frobnicate", "see: cacheblend ask --help-all"),
        ("ask two words", "put text with spaces in quotes; see: cacheblend ask --help"),
        ("search", "write: cacheblend search QUERY"),
        ("config set seed", "write: cacheblend config set KEY VALUE..."),
        ("chunks ls --limit 0", "--limit: maximum number of chunks"),
        ("chunks ls --frobnicate", "see: cacheblend chunks ls --help"),
        ("chunks frobnicate", "see: cacheblend chunks --help"),
    ],
)
def test_a_hint_belongs_to_the_mistake(cli: Cli, arguments: str, hint: str) -> None:
    result = cli(*arguments.split())
    assert (result.code, result.err.splitlines()[-1]) == (2, f"hint: {hint}")


def test_commands_that_check_and_measure_are_a_group_of_their_own(cli: Cli) -> None:
    everyday, checks = cli("--help").out.partition("\nCommands:\n")[2].split("\nChecks and measurements:\n")
    assert [line.split()[0] for line in checks.splitlines()] == ["doctor", "demo", "bench", "eval"]
    assert len(everyday.splitlines()) == len(COMMANDS) - 4


@pytest.mark.parametrize(("given", "meant"), [("ls", "chunks ls"), ("pull", "models pull"), ("serv", "serve")])
def test_an_unknown_command_is_answered_with_the_one_that_was_meant(given: str, meant: str, cli: Cli) -> None:
    result = cli(given)
    assert result.code == 2
    assert f"did you mean {meant}? " in result.err
    assert "Usage:" in cli(*meant.split(), "--help").out
