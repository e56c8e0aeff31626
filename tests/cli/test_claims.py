"""What `ask` shows of an answer's claims: a line for those that are not in the sources, and their lines in JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

PAGE = "\n# Page\n\nOne line.\nJonas Berg keeps 3 parrots at home.\nAnother line.\n"
RIGHT, WRONG = "Jonas Berg keeps 3 parrots", 'Jonas Borg keeps 4 parrots, "all of them green"'


@pytest.fixture
def asked(cli: Cli, tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "page.md").write_text(PAGE)
    assert cli("precompute", "page.md").code == 0
    return ("ask", "who keeps parrots?", "--max-tokens", "60")


def test_a_line_names_what_is_in_no_source(cli: Cli, asked: tuple[str, ...]) -> None:
    wrong = cli(*asked, "--regex", WRONG)
    assert wrong.out == f"{WRONG}\n"
    assert 'warning: not in the sources: "Jonas Borg", 4\n' in wrong.err  # no quotation: the form was given
    right = cli(*asked, "--regex", RIGHT)
    assert right.out == f"{RIGHT}\n"
    assert "not in the sources" not in right.err


def test_claims_have_their_lines(cli: Cli, asked: tuple[str, ...]) -> None:
    [answer] = cli(*asked, "--regex", RIGHT, "--json").records
    places = [(c["text"], c["found"], c["chunk"], c["place"]) for c in answer["claims"]]
    assert places == [("Jonas Berg", True, 0, "line 5"), ("3", True, 0, "line 5")]
    assert answer["chunks"][0]["place"] == "lines 2-6"
    [line] = cli(
        "ask",
        "--batch",
        "-",
        "--json",
        "--regex",
        WRONG,
        "--max-tokens",
        "60",
        stdin='{"question": "who keeps parrots?"}\n',
    ).records
    assert [c["text"] for c in line["claims"] if not c["found"]] == ["Jonas Borg", "4"]


def test_what_the_question_says_is_found_in_no_chunk(cli: Cli, asked: tuple[str, ...]) -> None:
    [answer] = cli("ask", "Is it Jonas Borg who keeps parrots?", *asked[2:], "--regex", WRONG, "--json").records
    assert [(c["text"], c["found"], c["chunk"]) for c in answer["claims"]] == [
        ("Jonas Borg", True, None), ("4", False, None),
    ]  # fmt: skip


def test_an_unsupported_answer_is_refused(cli: Cli, asked: tuple[str, ...]) -> None:
    refused = cli(*asked, "--regex", WRONG, "--on-unsupported", "refuse")
    assert (refused.code, refused.out) == (3, "")
    assert 'error: the answer is withheld: not in the sources: "Jonas Borg", 4\nhint: ' in refused.err
    assert cli(*asked, "--regex", RIGHT, "--on-unsupported", "refuse").out == f"{RIGHT}\n"


@pytest.mark.parametrize("flags", [("--confirm", "marked"), ("--on-unsupported", "confirm")], ids=" ".join)
def test_only_an_unsupported_answer_is_confirmed(cli: Cli, asked: tuple[str, ...], flags: tuple[str, ...]) -> None:
    assert "confirmed: a full prefill" in cli(*asked, "--regex", WRONG, *flags).err
    assert "confirmed" not in cli(*asked, "--regex", RIGHT, *flags).err


def test_the_question_may_be_marked(cli: Cli, asked: tuple[str, ...]) -> None:
    result = cli("ask", "marked", "--confirm", *asked[2:], "--json", "--chunks", "")
    assert result.records[0]["confirm"]["confirmed"] is True
