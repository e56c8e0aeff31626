"""Chunks between planning and storing: what is stored does not depend on how many of them a run could keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore

from cacheblend_cli.collect import plan
from cacheblend_cli.collect.plan import Planner
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.engine import Engine


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(3):
        lines = [f"## Part {i}\n\nÅsa leads team {7 * i + number} in 東京, since {i}.\n" for i in range(4)]
        (folder / f"{number}.md").write_text(f"# Page {number}\n\n" + "\n".join(lines))
    return folder


def stored(engine: Engine, docs: Path, path: Path, **given: Any) -> tuple[list[Any], list[Any]]:
    """(chunks, documents) without times."""
    options = PrecomputeOptions(chunk_tokens=24, kv_dtype="exact", **given)
    with ChunkStore.open(path, mode="write") as store:
        report = engine.precompute(store, [str(docs)], options, lambda event: None)
        assert report.new == sum(1 for _ in store.chunks()) > 10
        return [replace(m, created=0.0) for m in store.chunks()], [replace(d, updated=0.0) for d in store.documents()]


@pytest.mark.parametrize("context", ["sink", "document"])
@pytest.mark.parametrize("room", [0, 1500])  # none, and some documents'
def test_what_is_stored_is_the_same_without_room(
    engine: Engine, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str, room: int
) -> None:
    cuts, cut = list[Any](), Planner._cut

    def counted(self: Planner, *given: Any) -> Any:
        cuts.append(given[0])
        return cut(self, *given)

    monkeypatch.setattr(Planner, "_cut", counted)
    there = stored(engine, docs, tmp_path / "kept", context=context)
    assert len(cuts) == 3  # each document once
    monkeypatch.setattr(plan, "KEPT_BYTES", room)
    assert stored(engine, docs, tmp_path / "cut again", context=context) == there
    assert 6 < len(cuts) <= 9
