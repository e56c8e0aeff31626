"""A model on transformers' own layers, from the command line: it answers, and it is said how it is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_models import HubModel
from transformers import OlmoConfig

PATH = "generic path"


@pytest.fixture
def model(tmp_path: Path) -> str:
    HubModel("olmo", OlmoConfig).write(tmp_path / "m")
    return str(tmp_path / "m")


def test_a_generic_model_answers_and_reports_its_path(cli: Callable[..., Any], model: str, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("the lead of billing is Mara and she works in Bergen\n\nJonas keeps a parrot\n")
    store = ("--model", model, "--store", str(tmp_path / "store"))
    assert cli("precompute", str(tmp_path / "notes.md"), "--chunk-tokens", "16", *store).code == 0
    told = cli("ask", "who is the lead of billing?", "--top-k", "3", "--max-tokens", "3", "--explain", "--json", *store)
    answer = json.loads(told.out)
    assert answer["generated_tokens"] == 3
    assert answer["cached_tokens"] > 0
    assert any(PATH in note for note in answer["notes"])
    quiet = cli("ask", "who is the lead of billing?", "--top-k", "3", "--max-tokens", "3", "--json", *store)
    assert not any(PATH in note for note in json.loads(quiet.out)["notes"])


def test_models_show_and_doctor_report_the_generic_path(cli: Callable[..., Any], model: str) -> None:
    shown = json.loads(cli("models", "show", model, "--json").out)
    assert PATH in shown["computed_by"]
    assert (shown["layers"], shown["context"]) == (3, 512)
    assert PATH in json.loads(cli("doctor", "--model", model, "--json").out)["model"]["computed_by"]


def test_the_models_check_passes(cli: Callable[..., Any], model: str) -> None:
    record = json.loads(cli("models", "check", model, "--json").out)
    assert record["passed"]
    assert 0 < record["transformers"] <= record["limit"]
