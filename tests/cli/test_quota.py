"""precompute under a quota: KV that fits stays, none is computed only to be evicted, and the rest is reported once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore, prune, stats

from cacheblend_cli.collect import commits

Cli = Callable[..., Any]
COMMAND = ("precompute", "docs", "--chunk-tokens", "40", "--json")


@pytest.fixture
def corpus(docs: Path) -> Path:
    for i in range(6):
        (docs / f"{i}.md").write_text(f"page {i} " + "of the lead in Bergen " * (6 + i))
    return docs


def kv(cli: Cli) -> dict[str, str]:
    return {r["id"]: r["kv"] for r in cli("chunks", "ls", "--json").records}


def sizes(path: Path) -> dict[str, int]:
    """Bytes of KV of every chunk, the prefix's too."""
    with ChunkStore.open(path) as store:
        return {m.id: m.num_bytes for m in store.chunks(prefixes=True)}


@pytest.fixture
def needed(cli: Cli, corpus: Path, tmp_path: Path) -> int:
    """Bytes of KV and text of the whole corpus and its prefix."""
    other = tmp_path / "whole"
    assert cli(*COMMAND, "--store", str(other)).code == 0
    with ChunkStore.open(other) as store:
        found = stats(store)
    return found.quota_bytes + 8 * found.documents  # the times in their records have more digits or fewer


@pytest.mark.parametrize("context", ["sink", "document", "neighbours"])
def test_a_second_run_computes_and_replaces_nothing(cli: Cli, needed: int, tmp_path: Path, context: str) -> None:
    limit = ("--max-size", str(needed // 2), "--context", context)
    first = cli(*COMMAND, *limit)
    assert first.code == 0, first.err
    before = kv(cli)
    assert set(before.values()) == {"stored", "none"}, "nothing was computed only to be evicted"
    assert sum(sizes(tmp_path / "store").values()) <= needed // 2
    assert {r["id"]: r["bytes"] > 0 for r in first.records} == {
        name: state == "stored" for name, state in before.items()
    }
    generation = ChunkStore.open(tmp_path / "store").generation
    second = cli(*COMMAND, *limit)
    assert {r["status"] for r in second.records} == {"unchanged"}
    assert "tokens/s" not in second.err, "nothing is computed"
    assert kv(cli) == before
    assert ChunkStore.open(tmp_path / "store").generation == generation


def test_kv_beyond_the_quota_is_reported_once_with_the_needed_size(cli: Cli, needed: int) -> None:
    said = cli(*COMMAND, "--max-size", str(needed - 200))
    assert said.err.count("--max-size") == 1
    [size] = [word for word in said.err.split() if word.endswith(("KB", "MB"))]
    assert f"{sum(state != 'stored' for state in kv(cli).values())} of" in said.err
    whole = cli(*COMMAND, "--max-size", size)
    assert "--max-size" not in whole.err
    assert set(kv(cli).values()) == {"stored"}
    assert {r["status"] for r in whole.records} == {"new", "unchanged"}, "KV that was not there is no replacement"


def test_just_what_is_needed_is_enough(cli: Cli, needed: int) -> None:
    assert "--max-size" not in cli(*COMMAND, "--max-size", str(needed)).err
    assert set(kv(cli).values()) == {"stored"}


@pytest.mark.parametrize("max_size", ["1", "5000"])
def test_a_quota_that_holds_no_chunk_keeps_the_text(cli: Cli, corpus: Path, max_size: str) -> None:
    for _ in range(2):
        assert cli(*COMMAND, "--max-size", max_size).code == 0
        assert set(kv(cli).values()) == {"none"}
    asked = cli("ask", "page 3 lead in Bergen", "--json", "--max-tokens", "2")
    assert asked.code == 0
    assert {c["status"] for c in asked.records[0]["chunks"]} == {"computed"}


def test_the_right_page_is_asked_whatever_was_evicted(cli: Cli, needed: int) -> None:
    """An earlier version answered from another page, because the right one was no longer in the index."""
    whole = cli("ask", "page 0 lead", "--store", "whole", "--json", "--max-tokens", "4").records[0]
    cli(*COMMAND, "--max-size", str(needed // 4))
    asked = cli("ask", "page 0 lead", "--json", "--max-tokens", "4").records[0]
    assert [c["source"] for c in asked["chunks"]] == [c["source"] for c in whole["chunks"]]


def test_documents_of_this_run_take_the_room_of_others(cli: Cli, corpus: Path, needed: int, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for i in range(8):
        (tmp_path / "other" / f"{i}.md").write_text(f"other {i} " + "of the badge in Oslo " * 8)
    cli("precompute", "other", "--max-size", str(needed))
    with ChunkStore.open(tmp_path / "store") as store:
        text = stats(store).text_bytes + stats(store).document_bytes  # of the others: they stay, and count
    cli(*COMMAND, "--max-size", str(needed + text))
    states = {r["source"]: r["kv"] for r in cli("chunks", "ls", "--json").records}
    assert {state for source, state in states.items() if source.startswith("docs")} == {"stored"}
    assert "evicted" in {state for source, state in states.items() if source.startswith("other")}


def test_a_changed_document_is_replaced_within_the_quota(cli: Cli, corpus: Path, needed: int) -> None:
    limit = ("--max-size", str(needed // 2))
    cli(*COMMAND, *limit)
    before = kv(cli)
    (corpus / "0.md").write_text("something else entirely\n")
    changed = [r for r in cli(*COMMAND, *limit).records if r["status"] != "unchanged"]
    assert changed[0]["source"] == "docs/0.md"
    assert changed[0]["status"] == "replaced"
    assert {name for name, state in before.items() if state == "stored"} - {
        name for name, state in kv(cli).items() if state == "stored"
    } <= set(before) - set(kv(cli)), "what had KV and is still there has it"


def test_force_computes_what_fits(cli: Cli, needed: int) -> None:
    limit = ("--max-size", str(needed // 2))
    cli(*COMMAND, *limit)
    before = kv(cli)
    again = cli(*COMMAND, *limit, "--force")
    assert {r["status"] for r in again.records} == {"unchanged"}
    assert "tokens/s" in again.err
    assert kv(cli) == before


def test_prune_beside_a_running_precompute_removes_nothing_of_it(
    cli: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every commit of a run another process prunes orphans."""
    pruned: list[bytes] = []
    put = ChunkStore.put_chunks

    def put_and_prune(store: ChunkStore, *arguments: Any, **more: Any) -> Any:
        done = put(store, *arguments, **more)
        with ChunkStore.open(tmp_path / "store", mode="write") as other:
            pruned.extend(prune(other, orphans=True).keys)
        return done

    monkeypatch.setattr(commits, "GROUP_SECONDS", 0.0)
    monkeypatch.setattr(ChunkStore, "put_chunks", put_and_prune)
    assert cli(*COMMAND).code == 0
    (docs / "alpha.md").write_text("# alpha\n\n" + "who works in Bergen, in the office of billing\n\n" * 12)
    assert cli(*COMMAND).code == 0
    assert pruned == []
    assert {r["status"] for r in cli(*COMMAND).records} == {"unchanged"}


def test_what_an_interrupt_left_is_found_and_goes_on(
    cli: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished document has its whole text, and the KV of the committed chunks."""
    (docs / "long.md").write_text("\n\n".join(f"paragraph {i} of the lead in Bergen." for i in range(60)))
    count = 0
    put = ChunkStore.put_chunks

    def interrupted(store: ChunkStore, *arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return put(store, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(commits, "GROUP_SECONDS", 0.0)
        patch.setattr(ChunkStore, "put_chunks", interrupted)
        stopped = cli("precompute", "docs/long.md", "--chunk-tokens", "40", "--json")
    assert stopped.code == 130
    states = kv(cli)
    there = {name for name, state in states.items() if state == "stored"}
    assert there == {r["id"] for r in stopped.records} != set()
    assert "none" in states.values()
    assert cli("ask", "paragraph 59 lead", "--max-tokens", "1", "--no-save").code == 0
    assert cli("chunks", "prune", "--orphans", "--json").records[0]["removed"] == 0
    again = cli("precompute", "docs/long.md", "--chunk-tokens", "40", "--json").records
    assert {r["id"] for r in again if r["status"] == "unchanged"} == there
    assert {r["status"] for r in again} == {"unchanged", "new"}
    assert set(kv(cli)) == set(states)
    assert cli("chunks", "rm", "--source", "docs/long.md").code == 0
    assert kv(cli) == {}


def test_a_dry_run_counts_what_the_quota_has_room_for(cli: Cli, needed: int) -> None:
    limit = ("--max-size", str(needed // 2))
    told = cli(*COMMAND, *limit, "--dry-run")
    assert told.err.count("--max-size") == 1
    done = cli(*COMMAND, *limit)
    assert told.records[0]["bytes"] == sum(r["bytes"] for r in done.records)
    assert told.records[0]["new"]["bytes"] == told.records[0]["bytes"]
    [again] = cli(*COMMAND, "--dry-run").records
    assert (again["new"]["chunks"], again["seconds"]) == (0, 0.0)
    assert again["unchanged"]["chunks"] == len(done.records)


def test_the_quota_holds_for_records_with_long_ids(cli: Cli, docs: Path, tmp_path: Path) -> None:
    """The id of a record is in the place of each of its chunks."""
    (docs / "x.json").write_text(json.dumps([{"id": "I" * (1 << 18), "text": ("word " * 20 + "\n\n") * 60}]))
    limit = 450_000
    assert cli(*COMMAND, "--max-size", str(limit)).code == 0
    with ChunkStore.open(tmp_path / "store") as store:
        found = stats(store)
        [record] = [r for r in store.documents() if r.source.endswith("x.json")]
    assert len(record.chunks) > 20
    assert found.quota_bytes <= limit
    assert found.document_bytes < 100_000
    assert found.file_bytes < 2 * limit  # its pages are not all full
