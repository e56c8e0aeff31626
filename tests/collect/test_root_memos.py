"""Memos of roots are read as they were written, also by other versions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cacheblend_store import Memo

from cacheblend_cli.collect.settings import CollectSettings, DocumentRoot
from cacheblend_cli.corpus.walk import ALL, Selection

ROOT = DocumentRoot(
    "/docs", "model", "salt", CollectSettings(overlap=3), frozenset({"/b.md", "/a.md"}), frozenset({"/project"}), 5.0,
    Selection(include=("*.md",), follow=True), frozenset({"handbook"}),
)  # fmt: skip


def written(**changes: Any) -> Memo:
    """As it comes back from the store; None takes a field away."""
    memo = ROOT.memo()
    value = {k: v for k, v in (json.loads(json.dumps(memo.value)) | changes).items() if v is not None}
    return Memo(memo.kind, memo.name, value, memo.updated)


def test_a_root_is_remembered_as_it_was() -> None:
    found = DocumentRoot.of_memo(written())
    assert found == ROOT
    assert found is not None
    assert found.updated == 5.0


def test_what_an_earlier_version_wrote_is_read() -> None:
    found = DocumentRoot.of_memo(written(selection={"follow": True}, collections=None, later=1))
    assert found is not None
    assert (found.selection, found.collections) == (Selection(follow=True), frozenset())
    found = DocumentRoot.of_memo(written(selection=None))
    assert found is not None
    assert found.selection == ALL


@pytest.mark.parametrize(
    "changes",
    [{"path": None}, {"linked": 3}, {"settings": {"context": "of a later version"}}, {"settings": {"window": 0}}],
)
def test_invalid_root_memos_are_ignored(changes: dict[str, Any]) -> None:
    assert DocumentRoot.of_memo(written(**changes)) is None
