"""An ask reads each chunk's record once before it runs, and once more where its KV is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from cacheblend_store import ChunkStore, reader
from callbacks import answered
from engine_driver import StoredEngine, open_stored_engine

from cacheblend_cli.corpus.citations import Citations
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import AskRequest, SamplingParams, SearchParams


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_stored_engine(tmp_path_factory.mktemp("resolved"), num_hidden_layers=2) as stored:
        yield stored


def counted(
    monkeypatch: pytest.MonkeyPatch, counts: Counter[Any], owner: object, name: str, of: Callable[..., Any]
) -> None:
    """Count the calls of a function by what `of` makes of their arguments."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        counts[of(*arguments)] += 1
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("searches", [False, True])
def test_an_ask_reads_each_record_once(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch, searches: bool) -> None:
    question = "where does the harbor keeper with the parrot live?"
    params = SamplingParams(max_tokens=2)
    ask = AskRequest(question, stored.keys[:5], sampling=params)
    if searches:
        ask = AskRequest(question, search=SearchParams(k=5), sampling=params)
    stored.engine.run_alone(stored.store, ask)
    records, others = Counter[bytes](), Counter[str]()
    counted(monkeypatch, records, reader.records, "decode_manifest", lambda key, value: key)
    counted(monkeypatch, others, Citations, "all_of", lambda *_: "citation")
    counted(monkeypatch, others, Runtime, "template_of", lambda *_: "template")
    counted(monkeypatch, others, ChunkStore, "read", lambda *_: "transaction")
    request = stored.engine.resolve(stored.store, ask)
    assert len(request.chunks) == 5
    assert set(records) == {*request.named, request.collection.prefix_key}
    assert set(records.values()) == {1}
    assert others["citation"] == 5
    assert others["template"] <= 3
    assert others["transaction"] <= 3 + searches  # whether the store has what the index names
    answer = answered(stored.engine, request)
    assert records.total() <= 2 * 6, "the loader checks each record when it loads the KV"
    assert others["citation"] == 5
    assert [use.source for use in answer.chunks] == [chunk.citation.source for chunk in request.chunks]
