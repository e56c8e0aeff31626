"""An answer's sources: their shares of its attention, where they stand, and the page and the terminal that show
them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.corpus.search import WEAK, left_out_notes
from cacheblend_cli.demo import office_dir

Cli = Callable[..., Any]


class Page(HTMLParser):
    """The texts by class, and every tag and attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self.marked: list[tuple[str, str]] = []
        self._class = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag == "mark":
            self._class = dict(attrs)["class"] or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "mark":
            self._class = ""

    def handle_data(self, data: str) -> None:
        if self._class:
            self.marked.append((self._class, data))


def test_sources_are_named_with_their_lines_and_explain_shows_their_attention(cli: Cli, stored: list[str]) -> None:
    asked = ("ask", "who leads?", "--chunks", f"{stored[0]},{stored[-1]}", "--max-tokens", "8")
    [record] = cli(*asked, "--json").records
    shares = [chunk["attention"] for chunk in record["chunks"]]
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    assert all(share > 0 for share in shares)
    told = cli(*asked)
    for chunk in record["chunks"]:
        assert chunk["place"].startswith("line")
        assert f"{chunk['source']}, {chunk['place']}" in told.err
        assert chunk["rank"] is None  # it was named
    assert "%" not in "".join(line for line in told.err.splitlines() if record["chunks"][0]["place"] in line)
    explained = cli(*asked, "--explain").err
    assert all(f"{share:.0%}" in explained for share in shares)
    assert told.out.count("\n") == 1
    assert cli(*asked, "--quiet").err == ""


def test_sources_are_listed_by_their_rank_in_the_search(cli: Cli, docs: Path) -> None:
    (docs / "first.md").write_text("# Parrots\n\nThe parrot likes nuts.\n")
    (docs / "second.md").write_text(
        "# Other birds\n\nOne page about a parrot that likes nothing, " + "and so on " * 60 + "\n"
    )
    assert cli("precompute", "docs", "--chunk-tokens", "64").code == 0
    asked = ("ask", "what nuts does the parrot like?", "-k", "4", "--max-tokens", "2", "--expand", "1")
    found = cli("search", "what nuts does the parrot like?", "-k", "4", "--expand", "1", "--json").records
    [record] = cli(*asked, "--json").records
    by_rank = sorted(record["chunks"], key=lambda chunk: chunk["rank"])
    assert [c["rank"] for c in by_rank] == list(range(1, len(by_rank) + 1))
    assert [c["source"] for c in by_rank] == [f"{hit['source']}" for hit in found]
    lines = [
        line.partition("source: ")[2] for line in cli(*asked, "-v").err.splitlines() if line.startswith("source: ")
    ]
    assert [line.split(",")[0] for line in lines] == [c["source"] for c in by_rank]


def test_an_answer_ends_with_three_sources_and_one_short_line(cli: Cli, stored: list[str]) -> None:
    asked = ("ask", "alpha beta?", "--chunks", ",".join(stored[:5]), "--max-tokens", "20", "--ratio", "0.3")
    [record] = cli(*asked, "--json").records
    *sources, more, summary = cli(*asked, "--stop", "\n\n\n").err.splitlines()
    sources = [line for line in sources if not line.startswith("the answer was cut")]
    assert sources == [
        f"source: {c['source']}, {c['place']}, {' / '.join(c['headings'])}" for c in record["chunks"][:3]
    ]
    assert more == "and 2 more"
    share = record["recomputed_tokens"] / record["cached_tokens"]
    work = f"{share:.0%} of {record['cached_tokens']} cached tokens recomputed"
    assert re.fullmatch(rf"\d+\.\d s: \d+\.\d s to start, then first token after \d+\.\d+ s; {work}", summary)
    verbose = cli(*asked, "-v").err.splitlines()
    assert sum(line.startswith("source: ") for line in verbose) == 5
    assert re.match(
        r"first token: blended \d+\.\d+ s; a full prefill takes about \d+\.\d+ s \(\d+\.\d x\)$", verbose[-2]
    )
    assert f"{record['exact_tokens']} exact here, {record['recomputed_tokens']} of the other " in verbose[-1]
    assert re.search(r"\d tokens/s(, \d+\.\d tokens a step \(\d+ accepted\))?$", verbose[-1])
    short = cli(*asked[:-4], "--max-tokens", "15", "-v").err
    assert "first token: " in short
    assert "tokens/s" not in short, "of so few tokens the speed is that of starting"
    assert "full prefill of " in cli(*asked, "--mode", "full").err.splitlines()[-1]


def test_a_weak_match_is_said_before_the_answer(cli: Cli, stored: list[str]) -> None:
    asked = ("ask", "Ulaanbaatar, capital of Mongolia, and its alpha?", "-k", "1", "--max-tokens", "2")
    [record] = cli(*asked, "--json").records
    assert record["notes"][0].startswith(f"{WEAK}: answered from it")
    assert record["weak_match"] is True
    told = cli(*asked).err
    assert told.count(WEAK) == 1
    assert "source: " not in told
    [nearest] = [line for line in told.splitlines() if line.startswith("nearest: ")]
    assert nearest.startswith(f"nearest: {record['chunks'][0]['source']}")
    assert told.splitlines()[told.splitlines().index(nearest) - 1].startswith("warning: the answer may be made up")
    assert cli("ask", "alpha beta", "-k", "1", "--max-tokens", "2", "--json").records[0]["weak_match"] is False
    assert cli("search", "Ulaanbaatar, capital of Mongolia, and its alpha?", "-k", "1").err.count(WEAK) == 1


@pytest.mark.skipif(find_spec("wordllama") is None, reason="needs the weights of wordllama")
def test_hits_that_were_left_out_are_counted_and_can_be_had(
    cli: Cli, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_SEARCH", "auto")
    shutil.copytree(office_dir(), "office")
    assert cli("precompute", "office").code == 0
    asked = ("ask", "What is the price of a parking permit?", "--source", "office", "--max-tokens", "2")
    [record] = cli(*asked, "--json").records
    assert [Path(chunk["source"]).name for chunk in record["chunks"]] == ["parking.md"]
    assert record["hits_cut"] >= 1
    [left_out] = left_out_notes(record["hits_cut"], 0)
    assert left_out not in cli(*asked).err
    for flag in ("-v", "--explain"):
        assert left_out in cli(*asked, flag).err
    assert left_out in cli("search", *asked[1:4]).err
    [every] = cli(*asked, "-k", "5", "--json").records
    assert len(every["chunks"]) == len(record["chunks"]) + record["hits_cut"]
    assert every["hits_cut"] == 0
    monkeypatch.setenv("CACHEBLEND_TOP_K", "5")
    assert cli(*asked, "--json").records[0]["hits_cut"] == 0


def test_a_hit_that_a_better_one_contains_is_counted_and_said(cli: Cli, stored: list[str]) -> None:
    Path("lent").mkdir()
    Path("lent/library.md").write_text("Books are lent for six weeks. Ask at the desk about a card.\n")
    Path("lent/note.md").write_text("Books are lent for six weeks.\n")
    assert cli("precompute", "lent").code == 0
    asked = (
        "ask",
        "Books: whom to ask at the desk about a card, lent for weeks?",
        "--source",
        "lent",
        "--max-tokens",
        "2",
    )
    [record] = cli(*asked, "--json").records
    assert [Path(chunk["source"]).name for chunk in record["chunks"]] == ["library.md"]
    assert record["hits_repeated"] == 1
    [left_out] = left_out_notes(0, 1)
    assert left_out not in cli(*asked).err
    for flag in ("-v", "--explain"):
        assert left_out in cli(*asked, flag).err
    assert left_out in cli("search", *asked[1:4]).err


def test_a_weak_match_can_be_refused(cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("ask", "Ulaanbaatar, capital of Mongolia, and its alpha?", "-k", "1", "--max-tokens", "2")
    refused = cli(*asked, "--on-weak-match", "refuse")
    assert (refused.code, refused.out) == (3, "")
    assert refused.err.startswith(f"error: {WEAK}\nhint: ")
    assert cli(*asked, "--on-weak-match", "refuse", "--chunks", stored[0]).code == 0, "named chunks are not searched"
    monkeypatch.setenv("CACHEBLEND_ON_WEAK_MATCH", "refuse")
    assert cli(*asked).code == 3
    assert cli("ask", "alpha beta", "-k", "1", "--max-tokens", "2").code == 0
    assert cli(*asked, "--on-weak-match", "maybe").code == 2


def test_an_answer_of_one_token_has_no_shares(cli: Cli, stored: list[str]) -> None:
    [record] = cli("ask", "who?", "--chunks", stored[0], "--max-tokens", "1", "--json").records
    assert [chunk["attention"] for chunk in record["chunks"]] == [None]


def test_the_page_shows_every_token_by_how_it_got_its_kv(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    chosen = ",".join(stored[:3])
    asked = ("ask", "who leads <b>?", "--chunks", chosen, "--max-tokens", "4", "--ratio", "0.3")
    [record] = cli(*asked, "--html", "answer.html", "--json").records
    text = (tmp_path / "answer.html").read_text(encoding="utf-8")
    page = Page(text)
    shown = "".join(data for _, data in page.marked[: -len(("exact", "reused", "recomputed", "computed"))])
    texts = "".join(cli("chunks", "show", name, "--json").records[0]["text"] for name in stored[:3])
    assert "".join(shown.split()) == "".join(texts.split())
    assert {kind for kind, _ in page.marked} == {"exact", "reused", "recomputed", "computed"}
    assert sum(c["recomputed"] for c in record["chunks"]) > 0
    assert "who leads &lt;b&gt;?" in text
    assert not page.tags & {"script", "img", "link", "iframe"}
    assert not {"src", "href"} & page.attributes.keys()
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(", text)


def test_what_a_document_says_is_no_markup(cli: Cli, docs: Path, tmp_path: Path) -> None:
    (docs / "alpha.md").write_text("parrot <script>alert(1)</script> \x1b[31m at home\n")
    assert cli("precompute", "docs/alpha.md").code == 0
    assert cli("ask", "parrot?", "--html", "answer.html", "--max-tokens", "2").code == 0
    text = (tmp_path / "answer.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\x1b" not in text


def test_a_page_is_of_one_answer_and_has_a_place(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    (tmp_path / "batch.jsonl").write_text('{"question": "who?"}\n')
    assert cli("ask", "--batch", "batch.jsonl", "--html", "x.html").code == 2
    assert cli("ask", "who?", "--chunks", stored[0], "--html", "nowhere/x.html", "--max-tokens", "1").code == 2


def test_explain_marks_the_tokens(cli: Cli, stored: list[str]) -> None:
    told = cli("ask", "who?", "--chunks", ",".join(stored[:3]), "--max-tokens", "2", "--explain", "--ratio", "0.3").err
    assert "exact  reused  [recomputed]  {computed}" in told
    assert re.search(r"\[[^\]]+\]", told.split("{computed}")[1])
