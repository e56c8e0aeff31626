"""What `ask` shows of an answer's claims: a line for those that are not in the sources, and their lines in JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

from cacheblend_cli.claims import LookedUp
from cacheblend_cli.types import Claim, unsupported_line

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
    assert cli(*asked, "--regex", WRONG, "--html", "a.html").code == 0
    assert "not in the sources: &quot;Jonas Borg&quot;, 4" in Path("a.html").read_text()
    right = cli(*asked, "--regex", RIGHT)
    assert right.out == f"{RIGHT}\n"
    assert "not in the sources" not in right.err


def test_the_line_is_short() -> None:
    line = unsupported_line([Claim(str(n), n, n + 1, "number", found=n == 0) for n in (*range(12), 3)])
    assert line == "not in the sources: 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"


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


@pytest.mark.parametrize(
    "flags", [("--confirm", "marked"), ("--confirm=marked",), ("--on-unsupported", "confirm")], ids=" ".join
)
def test_only_an_unsupported_answer_is_confirmed(cli: Cli, asked: tuple[str, ...], flags: tuple[str, ...]) -> None:
    assert "confirmed: a full prefill" in cli(*asked, "--regex", WRONG, *flags).err
    assert "confirmed" not in cli(*asked, "--regex", RIGHT, *flags).err


def test_the_question_may_be_marked(cli: Cli, asked: tuple[str, ...]) -> None:
    result = cli("ask", "marked", "--confirm", *asked[2:], "--json", "--chunks", "")
    assert result.records[0]["confirm"]["confirmed"] is True
    both = cli("ask", "--confirm", "marked", "marked", *asked[2:], "--json", "--chunks", "")
    assert (both.code, "confirm" in both.records[0]) == (0, False)
    last = cli(*asked[:1], *asked[2:], "--json", "--chunks", "", "--", "--confirm=marked")
    assert (last.code, "confirm" in last.records[0]) == (0, False)


def test_chat_names_or_refuses_what_is_in_no_source(
    cli: Cli, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()

    def check(answer: str, texts: list[str]) -> list[LookedUp]:
        looked_up.append(answer)
        return [LookedUp("54", 0, 2, "number", None)] * (len(looked_up) > 1)  # not in the first answer

    monkeypatch.setattr("cacheblend_cli.claims.check", check)
    turns, flags = "who keeps parrots?\nwhy parrots?\n", ("--max-tokens", "4")
    assert cli("chat", *flags, stdin=turns).err.count("warning: not in the sources: 54\n") == 1
    looked_up.clear()
    refused = cli("chat", *flags, "--on-unsupported", "refuse", stdin=turns)
    assert refused.code == 3
    assert refused.err.count("error: the answer is withheld: not in the sources: 54\n") == 1
    assert len(set(looked_up)) == len(looked_up) == 2  # each answer is made and looked up once
