"""A chat template that prints the date: it is taken once and kept, so that tomorrow's question finds today's chunks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from bare_store import bare_writing
from cacheblend_store import COLLECTION, ChunkStore, verify
from projects import listed, write

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.prompt import dates
from cacheblend_cli.prompt.records import keep_record
from cacheblend_cli.types import AskRequest

Cli = Callable[..., Any]
LLAMA = (
    "{{ bos_token }}{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% else %}{% set day = '26 Jul 2024' %}"
    "{% endif %}<|im_start|>system\nToday Date: {{ day }}<|im_end|>\n{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
FIRST = date(2024, 7, 26)


@pytest.fixture
def dated(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The commands, with a model whose template prints the date."""
    copy = tmp_path / "dated"
    shutil.copytree(model, copy)
    (copy / "chat_template.jinja").write_text(LLAMA)
    monkeypatch.setenv("CACHEBLEND_MODEL", str(copy))
    go_to(monkeypatch, FIRST)
    return cli


def go_to(monkeypatch: pytest.MonkeyPatch, day: date) -> None:
    monkeypatch.setattr(dates, "today", lambda: day)


def statuses(cli: Cli, *arguments: str) -> list[str]:
    result = cli("precompute", *arguments, "--json")
    assert result.code == 0, result.err
    return [r["status"] for r in result.records]


def interrupted(*arguments: Any, **named: Any) -> None:
    raise KeyboardInterrupt


def ask(cli: Cli, *arguments: str) -> dict[str, Any]:
    result = cli("ask", "alpha beta?", "-k", "2", "--max-tokens", "2", "--json", "--ids", *arguments)
    assert result.code == 0, result.err
    return result.records[0]


def test_the_date_is_taken_once_and_used_again(dated: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(statuses(dated, "docs")) == {"new"}
    first = ask(dated)
    assert first["notes"] == []
    go_to(monkeypatch, FIRST + timedelta(days=1))
    assert set(statuses(dated, "docs")) == {"unchanged"}
    asked = ask(dated)
    assert (asked["prompt_ids"], asked["notes"]) == (first["prompt_ids"], [])
    assert {c["status"] for c in asked["chunks"]} <= {"exact", "blended"}
    go_to(monkeypatch, FIRST + timedelta(days=2))
    asked = ask(dated)
    assert asked["prompt_ids"] == first["prompt_ids"]
    [note] = asked["notes"]
    assert "2024-07-26, 2 days ago" in note
    assert "cacheblend precompute --date today" in note
    assert "2 days ago" in dated("ask", "alpha?", "--max-tokens", "2").err


def test_another_date_is_asked_about_and_replaces_what_is_stored(
    dated: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    statuses(dated, "docs")
    first, before = ask(dated), {r["id"] for r in dated("chunks", "ls", "--json").records}
    later = FIRST + timedelta(days=600)
    go_to(monkeypatch, later)
    refused = dated("precompute", "docs", "--date", "today")
    assert refused.code == 2
    assert all(fact in refused.err for fact in ("2 documents", f"--date {FIRST}", f"--date {later}"))
    [facts] = dated("precompute", "docs", "--date", "today", "--dry-run", "--json").records
    assert facts["replaced"]["chunks"] == facts["removed"]["chunks"] == len(before)
    assert ask(dated)["prompt_ids"] == first["prompt_ids"], "what was refused or only planned changes nothing"
    assert set(statuses(dated, "docs", "--date", "today", "--yes")) == {"replaced"}
    after = {r["id"] for r in dated("chunks", "ls", "--json").records}
    assert not before & after
    asked = ask(dated)
    assert asked["prompt_ids"] != first["prompt_ids"]
    assert asked["notes"] == []
    assert {c["id"] for c in asked["chunks"]} <= after
    go_to(monkeypatch, later + timedelta(days=30))
    assert set(statuses(dated, "docs")) == {"unchanged"}
    assert set(statuses(dated, "docs", "--date", FIRST.isoformat(), "--yes")) == {"replaced"}
    assert ask(dated)["prompt_ids"] == first["prompt_ids"]
    with ChunkStore.open(tmp_path / "store") as store:
        assert verify(store).ok


def test_documents_elsewhere_are_told_of_and_not_lost(
    dated: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "notes/n.md", "alpha notes of beta\n")
    statuses(dated, "docs", "notes")
    go_to(monkeypatch, date(2024, 9, 1))
    result = dated("precompute", "docs", "--date", "today", "--yes")
    assert "(notes/n.md)" in result.err
    assert "notes/n.md" in listed(dated)
    assert "notes/n.md" not in {c["source"] for c in ask(dated, "-k", "9")["chunks"]}
    assert dated("precompute", "notes").code == 2, "what is stored there is computed again"
    assert statuses(dated, "notes", "--yes") == ["replaced"]
    assert "notes/n.md" in {c["source"] for c in ask(dated, "-k", "9")["chunks"]}
    assert "notes/n.md" not in dated("precompute", "docs").err


def test_a_template_without_a_date_is_as_it_was(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_to(monkeypatch, FIRST)
    statuses(cli, "docs")
    first = ask(cli)
    go_to(monkeypatch, date(2026, 1, 1))
    assert set(statuses(cli, "docs")) == {"unchanged"}
    assert ask(cli)["prompt_ids"] == first["prompt_ids"]
    assert ask(cli)["notes"] == []
    refused = cli("precompute", "docs", "--date", "today")
    assert refused.code == 2
    assert "--date" in refused.err
    assert cli("precompute", "docs", "--date", "yesterday").code == 2


def test_a_store_of_an_earlier_version_says_so_and_is_replaced(
    dated: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = statuses(dated, "docs")
    go_to(monkeypatch, FIRST + timedelta(days=90))
    with ChunkStore.open(tmp_path / "store", mode="write") as store, bare_writing(store) as (txn, dbs):
        txn.delete(store.memos(COLLECTION)[0].key, db=dbs["meta"])
    refused = dated("ask", "alpha beta?")
    assert refused.code == 3
    assert f"{len(before)} chunks are stored for" in refused.err
    assert "by an earlier version of cacheblend" in refused.err
    assert "precompute the documents" in refused.err
    assert dated("precompute", "docs").code == 2, "it is asked about"
    assert statuses(dated, "docs", "--yes") == ["replaced"] * len(before)
    assert len(dated("chunks", "ls", "--json").records) == len(before)
    assert {c["status"] for c in ask(dated)["chunks"]} <= {"exact", "blended"}


def test_the_date_goes_to_a_tier_and_comes_from_it(
    dated: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses(dated, "docs")
    first = ask(dated)
    go_to(monkeypatch, FIRST + timedelta(days=90))
    (tmp_path / "usb").mkdir()
    usb = f"file://{tmp_path / 'usb'}"
    assert dated("chunks", "push", usb).code == 0
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "other"))
    assert dated("chunks", "pull", usb).code == 0
    assert ask(dated)["prompt_ids"] == first["prompt_ids"]
    assert set(statuses(dated, "docs")) == {"unchanged"}


def test_salts_and_stores_have_dates_of_their_own(
    dated: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    statuses(dated, "docs")
    first = ask(dated)
    go_to(monkeypatch, date(2025, 1, 1))
    assert set(statuses(dated, "docs", "--salt", "x")) == {"new"}
    assert ask(dated, "--salt", "x")["prompt_ids"] != first["prompt_ids"]
    assert ask(dated)["prompt_ids"] == first["prompt_ids"]
    assert set(statuses(dated, "docs")) == {"unchanged"}


@pytest.mark.parametrize(("step", "status"), [("_put_texts", "replaced"), ("_store_kv", "new")])
def test_a_date_that_was_changed_halfway_is_gone_on_with(
    dated: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, step: str, status: str
) -> None:
    from cacheblend_cli.collect.storing import PlanStorage

    count = len(statuses(dated, "docs"))
    with monkeypatch.context() as patch:
        patch.setattr(PlanStorage, step, interrupted)
        assert dated("precompute", "docs", "--date", "2024-08-01", "--yes").code == 130
    assert statuses(dated, "docs", "--yes") == [status] * count
    assert len(dated("chunks", "ls", "--json").records) == count
    assert {c["status"] for c in ask(dated)["chunks"]} <= {"exact", "blended"}


def test_a_date_belongs_to_its_request(dated: Cli, tmp_path: Path) -> None:
    """Two salts of one store keep different dates: what one request reads changes nothing for the other."""
    runtime = Engine.load(EngineConfig(model=str(tmp_path / "dated"), threads=1)).runtime
    own, later = runtime.template, FIRST + timedelta(days=3)
    with ChunkStore.open(tmp_path / "kept", mode="write") as store:
        keep_record(store, runtime.collection(day=FIRST))
        keep_record(store, runtime.collection("other", day=later))
        assert [runtime.day(store, salt) for salt in ("", "other", "")] == [FIRST, later, FIRST]
        requests = [resolve(runtime, store, AskRequest("who?", (), salt=salt)) for salt in ("", "other")]
    assert [request.collection.day for request in requests] == [FIRST, later]
    assert len({request.collection.id for request in requests}) == 2
    assert runtime.template is own
