"""speculate: proposed tokens of a decode step. The setting, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli
from oracle_lookup import Oracle

from cacheblend_cli.engine import engine_thread
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.features import FEATURES, speculation
from cacheblend_cli.engine.features.speculation import Speculation
from cacheblend_cli.engine.runtime import Runtime

ASK = ("ask", "who leads billing?", "--max-tokens", "24")


class Recorder:
    """A lookup that proposes nothing and keeps what it is asked."""

    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[int] = ()

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        Recorder.prompt_ids = list(prompt_ids)

    def find(self, answer_ids: Sequence[int], most: int) -> None:
        Recorder.answer_ids = list(answer_ids)


@pytest.fixture
def speculates(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the engines of the commands were asked for."""
    asked = list[object]()

    def noted(runtime: Runtime) -> Speculation | None:
        asked.append(runtime.config.speculate)
        return Speculation.of(runtime)

    monkeypatch.setattr(engine_thread, "FEATURES", replace(FEATURES, speculation=noted))
    return asked


def test_an_answer_says_how_many_tokens_were_accepted(
    cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*ASK, "--chunks", ",".join(stored[:2]))
    monkeypatch.setenv("CACHEBLEND_SPECULATE", "4")
    monkeypatch.setattr(speculation, "PromptLookup", Recorder)
    plain = cli(*command, "--json").records[0]
    assert (plain["accepted_tokens"], plain["tokens_per_step"]) == (0, 1.0)
    assert "tokens a step" not in cli(*command, "-v").err
    Oracle(monkeypatch).learn_answer(Recorder.prompt_ids, Recorder.answer_ids)
    fast = cli(*command, "--json").records[0]
    assert fast["answer"] == plain["answer"]
    accepted = fast["accepted_tokens"]
    assert 0 < accepted < plain["generated_tokens"] - 1
    decoded = plain["generated_tokens"] - 1
    assert fast["tokens_per_step"] == pytest.approx(decoded / (decoded - accepted), abs=0.001)
    said = cli(*command, "-v").err
    assert f"{fast['tokens_per_step']:.1f} tokens a step ({accepted} accepted)" in said
    monkeypatch.setenv("CACHEBLEND_SPECULATE", "off")
    assert cli(*command, "--json").records[0]["accepted_tokens"] == 0
    one = cli(*command[:3], "1", *command[4:], "--json").records[0]
    assert (one["accepted_tokens"], one["tokens_per_step"]) == (0, 0)


@pytest.mark.parametrize(("value", "used"), [("4", 4), ("64", 64), ("1", 1), ("off", "off"), ("auto", "auto")])
def test_the_setting_is_a_number_or_a_word(
    value: str, used: object, cli: Cli, stored: list[str], speculates: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """In the variable, in a file and set by the command."""
    command = (*ASK[:3], "2", "--chunks", stored[0])
    speculates.clear()
    with monkeypatch.context() as patch:
        patch.setenv("CACHEBLEND_SPECULATE", value)
        assert cli(*command).code == 0
    assert cli("config", "set", "speculate", value).code == 0
    [shown] = [line for line in cli("config", "show").out.splitlines() if "speculate" in line]
    assert value in shown.split()
    assert cli(*command).code == 0
    assert cli("config", "unset", "speculate").code == 0
    (tmp_path / "cacheblend.toml").write_text(f"speculate = {json.dumps(used)}\n")
    assert cli(*command).code == 0
    assert speculates == [used] * 3


@pytest.mark.parametrize("written", ["0", '"fast"', "65", "true", "-1", "2.5", '"4"', '""', "[4]", '"Off"', "1e400"])
def test_other_values_are_refused(written: str, cli: Cli, stored: list[str], tmp_path: Path) -> None:
    (tmp_path / "cacheblend.toml").write_text(f"speculate = {written}\n")
    refused = cli(*ASK, "--chunks", stored[0])
    assert refused.code == 2, refused.out
    assert "speculate" in refused.err
    assert "hint" in refused.err


@pytest.mark.parametrize("value", ["0", "fast", "65", "true", "-1", "2.5", " ", "inf", "nan", "4 "])
def test_other_values_of_the_variable_and_the_command_are_refused(
    value: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("config", "set", "speculate", "--", value).code == 2 or value == "4 "
    monkeypatch.setenv("CACHEBLEND_SPECULATE", value)
    refused = cli("config", "show")
    asked = cli(*ASK)
    assert asked.code != 0
    assert "speculate" in (refused.err + asked.err).lower() or value == "4 "


def test_serve_has_a_flag(cli: Cli) -> None:
    """Checked before a model is loaded."""
    for value in ("0", "fast", "65"):
        refused = cli("serve", "--speculate", value)
        assert refused.code == 2
        assert "--speculate" in refused.err
    assert "--speculate" in cli("serve", "--help-all").out
    assert "--speculate" not in cli("ask", "--help-all").out
    told = cli("ask", "q", "--speculate", "4")
    assert told.code == 2
    assert "serve" in told.err


def test_the_engine_takes_a_number_or_a_word() -> None:
    assert [EngineConfig(speculate=value).speculate for value in ("auto", "off", 3)] == ["auto", "off", 3]
