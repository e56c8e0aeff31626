"""Without a setting, commands use the model that the store was last precomputed with."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from command_line import Cli

from cacheblend_cli.model.named import HANDBOOK


@pytest.fixture
def named(cli: Cli, docs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model, given once."""
    monkeypatch.delenv("CACHEBLEND_MODEL")
    name = os.path.relpath(model)
    assert cli("precompute", "docs", "--model", name, "-q").code == 0
    return name


def asked(cli: Cli, *flags: str) -> str:
    [answer] = cli("ask", "alpha", "--max-tokens", "2", "--json", *flags).records
    return answer["model"]


def test_the_model_given_once_is_used_for_its_store_alone(
    cli: Cli, named: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert asked(cli, "--all") == str(model)
    assert "2 unchanged" in cli("precompute").err
    elsewhere = ("--store", str(tmp_path / "other"))
    assert cli("precompute", "../docs", "--model", HANDBOOK, "-q", *elsewhere).code == 0
    assert asked(cli, "--all", *elsewhere) == HANDBOOK
    assert asked(cli, "--all") == str(model)


def test_a_setting_goes_first(cli: Cli, named: str) -> None:
    assert cli("precompute", "docs", "--model", HANDBOOK, "-q").code == 0
    assert asked(cli) == HANDBOOK  # the last one
    assert cli("config", "set", "model", named).code == 0
    assert asked(cli) != HANDBOOK
    assert asked(cli, "--model", HANDBOOK) == HANDBOOK


def test_it_is_said_once_on_a_terminal(cli: Cli, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    asked = ("ask", "alpha", "--max-tokens", "2")
    assert "cacheblend config set model" in cli(*asked).err
    assert "cacheblend config set model" not in cli(*asked).err


def test_a_model_that_is_gone_is_forgotten(cli: Cli, docs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHEBLEND_MODEL")
    shutil.copytree(model, "copy")
    assert cli("precompute", "docs", "--model", "copy", "-q").code == 0
    shutil.rmtree("copy")
    monkeypatch.setattr("cacheblend_cli.model.named.smollm2_file", lambda: None)
    result = cli("ask", "alpha")
    assert result.code == 3
    assert "no --model was given" in result.err


def test_another_model_names_the_one_with_documents(cli: Cli, named: str) -> None:
    found = cli("ask", "alpha", "--model", HANDBOOK)
    assert found.code == 3
    assert "cacheblend config set model" in found.err
    none = cli("precompute", "--model", HANDBOOK)
    assert none.code == 3
    assert "cacheblend config set model" in none.err


def test_a_built_in_name_goes_before_a_folder(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHEBLEND_MODEL")
    docs.rename(HANDBOOK)
    assert cli("precompute", HANDBOOK, "--model", HANDBOOK, "-q").code == 0
    assert asked(cli) == HANDBOOK
