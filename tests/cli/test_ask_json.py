"""The JSON of an answer is as docs/json.md and docs/ask.schema.json describe it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from answer_schema import SCHEMA, problems
from command_line import Cli


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--verify", "--explain", "--ids", "--logprobs", "2"),
        ("--ratio", "auto", "--confirm"),
        ("--mode", "full"),
        ("--chunks", ""),
    ],
    ids=" ".join,
)
def test_an_answer_is_as_the_schema_describes_it(cli: Cli, stored: list[str], flags: tuple[str, ...]) -> None:
    chunks = () if "--chunks" in flags else ("--chunks", ",".join(stored[:3]))
    result = cli("ask", "who leads billing?", *chunks, "--json", "--max-tokens", "3", *flags)
    assert result.code in (0, 6), result.err  # 6: --confirm changed the answer
    [answer] = result.records
    assert problems(answer) == []
    assert answer["schema_version"] == 1


def test_a_line_of_a_batch_is_as_the_schema_describes_it(cli: Cli, stored: list[str]) -> None:
    lines = json.dumps({"question": "who leads billing?", "chunks": stored[:2]}) + "\n"
    [answer] = cli("ask", "--batch", "-", "--json", "--max-tokens", "2", stdin=lines).records
    assert problems(answer) == []
    assert (answer["question"], answer["asked_chunks"]) == ("who leads billing?", stored[:2])


@pytest.mark.parametrize("change", [{"ratio": "much"}, {"new_key": 1}, {"timing": {}}], ids=str)
def test_another_form_is_found(cli: Cli, stored: list[str], change: dict[str, Any]) -> None:
    [answer] = cli("ask", "who?", "--chunks", stored[0], "--json", "--max-tokens", "1").records
    assert problems(answer) == []
    assert problems(answer | change)


def test_each_field_has_a_meaning() -> None:
    for name, part in SCHEMA["$defs"].items():
        for field, described in part["properties"].items():
            assert described["description"].strip(), f"{name}.{field}"
