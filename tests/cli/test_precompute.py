"""cacheblend precompute: what it stores, what it removes, and what it says of documents it cannot use."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from forging import forge
from tokenizers import Tokenizer as HFTokenizer

from cacheblend_cli.cli import precompute
from cacheblend_cli.client import Client, EngineLost
from cacheblend_cli.collect import speed
from cacheblend_cli.collect.events import PrecomputeEvent
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.collect.speed import CollectSpeed
from cacheblend_cli.collect.storing import PlanStorage
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.server import background

Cli = Callable[..., Any]


def digests(path: Path) -> dict[str, tuple[bytes, ...]]:
    with ChunkStore.open(path) as store:
        return {m.id: m.blob_digests for m in store.chunks()}


def test_precompute_reports_chunks_and_does_only_what_changed(cli: Cli, docs: Path) -> None:
    first = cli("precompute", "docs", "--chunk-tokens", "40", "--json").records
    assert {r["status"] for r in first} == {"new"}
    assert set(first[0]) == {"id", "source", "index", "tokens", "bytes", "status"}
    assert {r["status"] for r in cli("precompute", "docs", "--chunk-tokens", "40", "--json").records} == {"unchanged"}
    (docs / "alpha.md").write_text("# alpha\n\nsomething else entirely\n")
    (docs / "beta.md").unlink()
    again = cli("precompute", "docs", "--chunk-tokens", "40", "--json")
    assert [r["status"] for r in again.records] == ["replaced"]
    assert "docs/beta.md" in again.err
    listed = cli("chunks", "ls", "--json").records
    assert [r["id"] for r in listed] == [again.records[0]["id"]]


def test_force_computes_again_what_no_digest_finds_wrong(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    before = digests(tmp_path / "store")
    forge(tmp_path / "store", stored[1])
    arguments = ("precompute", "docs", "--chunk-tokens", "40", "--json")
    assert {r["status"] for r in cli(*arguments).records} == {"unchanged"}
    again = cli(*arguments, "--force").records
    assert [r["id"] for r in again if r["status"] == "replaced"] == [stored[1]]
    assert {r["status"] for r in again} == {"replaced", "unchanged"}  # the same bytes again are no replacement
    assert digests(tmp_path / "store") == before


def test_progress_goes_by_what_is_read_and_then_by_tokens(docs: Path, model: Path, tmp_path: Path) -> None:
    """Within a document, too: one large file is no empty bar."""
    (docs / "long.md").write_text("\n\n".join(f"paragraph {i} of the lead in Bergen." for i in range(200)))
    engine = Engine.load(EngineConfig(model=str(model)))
    events: list[PrecomputeEvent] = []
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        engine.precompute(store, [str(docs / "long.md")], PrecomputeOptions(chunk_tokens=40), events.append)
    kinds = [e.kind for e in events]
    reading = [e for e in events if e.kind == "reading"]
    assert kinds == ["reading"] * len(reading) + ["plan", "ready"] + ["chunk"] * (len(kinds) - len(reading) - 2)
    assert len(reading) > 10
    assert [e.done for e in reading] == sorted({e.done for e in reading})
    assert (reading[0].done, reading[0].total) == (1, 0), "a document was found"
    assert reading[-1].done == reading[-1].total == (docs / "long.md").stat().st_size
    assert sum(e.chunk.tokens for e in events if e.chunk) == next(e for e in events if e.kind == "plan").total


def sources(cli: Cli) -> set[str]:
    return {r["source"] for r in cli("chunks", "ls", "--json").records}


@pytest.mark.parametrize("root", [".", "./", "./docs/", "..", "/"])
def test_documents_that_are_gone_go_from_the_store(
    cli: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    """Those below the directory that was named, however it is spelt, and no others."""
    if root == "..":
        (tmp_path / "in").mkdir()
        monkeypatch.chdir(tmp_path / "in")
    elif root == "/":
        root = str(tmp_path)
    outside = tmp_path.parent / f"{tmp_path.name}-outside.md"
    outside.write_text("who works in Bergen\n")
    (docs / "notes.tex").write_text("a file that only its name brings in\n")
    assert cli("precompute", root).code == 0
    under = sources(cli)
    [beta] = (s for s in under if s.endswith("beta.md"))
    assert cli("precompute", beta.replace("beta.md", "notes.tex")).code == 0
    if root != "..":
        assert cli("precompute", str(outside), "-", stdin="the parrot at home\n").code == 0
    before = sources(cli)
    (docs / "beta.md").unlink()
    assert f"{beta}" in cli("precompute", root).err
    assert sources(cli) == before - {beta}


def test_a_directory_speaks_for_its_own_documents_alone(
    cli: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One store may serve several projects."""
    assert cli("precompute", ".").code == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "own.md").write_text("who works in Bergen\n")
    monkeypatch.chdir(other)
    before = sources(cli)
    assert before == {"../docs/alpha.md", "../docs/beta.md"}
    assert cli("precompute", ".").code == 0
    assert sources(cli) == before | {"own.md"}
    (other / "own.md").unlink()
    (other / "next.md").write_text("who works in Oslo\n")
    assert cli("precompute", ".", "--yes").code == 0
    assert sources(cli) == before | {"next.md"}
    (other / "docs").mkdir()
    same = other / "docs" / "alpha.md"
    same.write_bytes((docs / "alpha.md").read_bytes())
    assert {r["status"] for r in cli("precompute", "docs", "--json").records} == {"unchanged"}
    same.unlink()
    assert "docs/alpha.md" in cli("precompute", "docs", "--yes").err
    assert sources(cli) == before | {"next.md"}


def test_a_document_that_cannot_be_read_keeps_what_is_stored(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("precompute", "docs").code == 0
    before, read = sources(cli), Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "beta.md":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    again = cli("precompute", "docs")
    assert "docs/beta.md" in again.err
    assert sources(cli) == before


def test_dry_run_stores_nothing(cli: Cli, docs: Path, tmp_path: Path) -> None:
    [facts] = cli("precompute", "docs", "--dry-run", "--json").records
    assert facts["documents"] == 2
    assert facts["tokens"] > 0
    assert facts["seconds"] > 0
    assert not (tmp_path / "store").exists()
    assert "160 tokens to compute" in cli("precompute", "docs", "--dry-run").out


def test_a_long_run_says_beforehand_what_it_takes(cli: Cli, docs: Path) -> None:
    (docs / "alpha.md").write_text("\n\n".join(f"paragraph {i} of the lead in Bergen." for i in range(1500)))
    first = cli("precompute", "docs").err
    assert re.search(
        r"^ready to ask: 2 documents, \d\d chunks\n\d\d,\d{3} tokens to compute, .*iB of KV; Ctrl-C", first
    )
    assert not re.search("ready to ask|to compute", cli("precompute", "docs").err)
    (docs / "alpha.md").write_text("# alpha\n\nshort\n")
    again = cli("precompute", "docs").err
    assert "ready to ask: 2 documents, 2 chunks" in again
    assert "to compute" not in again


def test_the_time_of_a_run_comes_from_earlier_ones(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "measured now" in cli("precompute", "docs", "--dry-run").out
    monkeypatch.setattr(CollectSpeed, "rows_per_s", 2.0)
    assert "about 92 s (2 tokens/s" in cli("precompute", "docs", "--dry-run").out
    assert "about 92 s (2 tokens/s" in cli("precompute", "docs").err


@pytest.mark.parametrize(("earlier", "corrects"), [(0.0, True), (40.0, True), (500.0, False)])
def test_a_run_corrects_the_time_by_its_own_speed(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, earlier: float, corrects: bool
) -> None:
    (docs / "alpha.md").write_text("\n\n".join(f"paragraph {i} of the lead in Bergen." for i in range(900)))
    clock = count()
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))  # a second a chunk
    monkeypatch.setattr(CollectSpeed, "rows_per_s", earlier)
    told = cli("precompute", "docs").err
    assert ("as in earlier runs" in told) == bool(earlier)
    assert len(re.findall(r"^about \d\d s left", told, re.MULTILINE)) == corrects, told


@pytest.mark.parametrize("engine", ["none", "warm", "ends"])
def test_an_interrupted_run_says_who_computes_the_rest(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    class Warm:
        def finish(self, salt: str, *, on_battery: bool) -> int:
            assert not on_battery
            if engine == "ends":
                raise EngineLost("ended", "")
            return 2

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(precompute, "warm_engine", lambda resolved: None)
    monkeypatch.setattr(Client, "of", lambda settings: None if engine == "none" else Warm())
    monkeypatch.setattr(PlanStorage, "_store_kv", interrupt)
    told = cli("precompute", "docs", "--quiet")
    assert told.code == 130
    [line] = told.err.splitlines()
    assert line.startswith("interrupted; 2 chunks can be asked already, 0 have KV")
    assert ("running engine" in line, "--background" in line) == (engine == "warm", engine != "warm")
    assert {record["kv"] for record in cli("chunks", "ls", "--json").records} == {"none"}


def test_background_stores_texts_and_leaves_kv_to_an_engine(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, finished = list[float](), list[bool]()

    def finish(client: Client, salt: str, *, on_battery: bool) -> int:
        finished.append(on_battery)
        return 2

    with monkeypatch.context() as patched:
        patched.setattr(background, "start_own", lambda settings, idle_exit_s, flags: started.append(idle_exit_s))
        patched.setattr(background, "ask_status", lambda path: {"pid": 4711})
        patched.setattr(Client, "finish", finish)
        patched.setattr(PlanStorage, "store_kv", None)
        told = cli("precompute", "docs", "--background", "--json")
    assert (told.code, finished) == (0, [True])
    assert [(r["status"], r["bytes"]) for r in told.records] == [("new", 0)] * 2
    assert "0 of 2 chunks have KV" in told.err
    assert "process 4711" in told.err
    assert cli("precompute", "docs").code == 0
    monkeypatch.setattr(background, "start_own", None)
    told = cli("precompute", "docs", "--background")
    assert (told.code, "have KV" in told.err) == (0, False), "nothing is left to compute"
    assert started > [0.0]


@pytest.mark.parametrize("flags", [["--watch"], ["--dry-run"], ["--force"], ["--collector", "ray:local"]])
def test_flags_that_conflict_with_background(cli: Cli, docs: Path, flags: list[str]) -> None:
    told = cli("precompute", "docs", "--background", *flags)
    assert told.code == 2
    assert flags[0] in told.err


def test_chunks_larger_than_the_context_are_refused_by_name(cli: Cli, docs: Path) -> None:
    refused = cli("precompute", "docs", "--chunk-tokens", "9999")
    assert refused.code == 2
    assert "--chunk-tokens 9999" in refused.err
    assert "--chunk-tokens 512" in refused.err


@pytest.mark.parametrize(
    ("name", "data", "code", "says"),
    [
        ("im_end.md", b"stop <|im_end|> here <tool_call> and <s>", 0, ""),
        ("control.md", b"bell \x07 escape \x1b red", 0, ""),
        ("one.md", b"a", 0, ""),
        ("empty.md", b"", 2, "empty"),
        ("latin.md", b"caf\xe9 au lait", 2, "convert it: iconv -f cp1252 -t utf-8 FILE"),
        ("binary.md", b"\x00\x01\x02", 2, "binary"),
    ],
)
def test_odd_documents(
    cli: Cli, stored: list[str], tmp_path: Path, model: Path, name: str, data: bytes, code: int, says: str
) -> None:
    (tmp_path / name).write_bytes(data)
    result = cli("precompute", name, "--json")
    assert result.code == code, result.err
    assert says in result.err
    assert len(cli("chunks", "ls", "--json").records) == len(stored) + (code == 0)
    if code == 0:
        from cacheblend_cli.model.tokenizer import Tokenizer

        shown = cli("chunks", "show", result.records[0]["id"], "--json").records[0]
        tokenizer = Tokenizer(model)
        assert shown["text"] == data.decode() + "\n" or shown["text"] == data.decode()
        assert tokenizer.added_ids.isdisjoint(shown["token_ids"])
        assert tokenizer.decode(shown["token_ids"]) == shown["text"]
        assert cli("ask", "so?", "--chunks", shown["id"], "--max-tokens", "2").code == 0


def test_a_bad_file_in_a_directory_is_skipped_with_a_warning(cli: Cli, docs: Path) -> None:
    (docs / "bad.md").write_bytes(b"caf\xe9")
    (docs / "folder.md").mkdir()
    result = cli("precompute", "docs", "--json")
    assert result.code == 0
    assert "docs/bad.md" in result.err


@pytest.fixture
def refuses_bars(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cli's model has a control token of one character: no text with it can be kept apart from it."""
    folder = tmp_path / "refusing"
    shutil.copytree(model, folder)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["|"])
    tokenizer.save(str(folder / "tokenizer.json"))
    monkeypatch.setenv("CACHEBLEND_MODEL", str(folder))


@pytest.mark.usefixtures("refuses_bars")
def test_a_document_that_the_model_cannot_store_is_passed_over_and_the_rest_is_stored(cli: Cli, docs: Path) -> None:
    (docs / "table.md").write_text("# Prices\n\n| a | b |\n")
    result = cli("precompute", "docs")
    assert result.code == 0, result.err
    assert "skipped docs/table.md: the text contains '|', which this tokenizer cannot keep apart" in result.err
    assert "skipped 1 file: 1 with text that this model cannot store" in result.err
    assert {r["source"] for r in cli("chunks", "ls", "--json").records} == {"docs/alpha.md", "docs/beta.md"}
    named = cli("precompute", "docs/alpha.md", "docs/table.md")
    assert named.code == 2
    assert "docs/table.md was not stored: the text contains '|'" in named.err
    assert "PDF" not in named.err
