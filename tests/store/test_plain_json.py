"""Records are read against a schema: just its fields, each of its type and within its range."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from cacheblend_store.format.plain_json import Count, Moment, Size, TokenIds, load_object, typed


@dataclass(frozen=True)
class Record:
    text: str
    ids: TokenIds
    size: Size
    at: Moment
    span: tuple[Count, Count] = (0, 0)


WHOLE: dict[str, Any] = {"text": "a \ud800 ü", "ids": [0, (1 << 32) - 1], "size": 1, "at": 3, "span": [1, 2]}


def read(**changes: Any) -> Record:
    return typed(load_object(json.dumps(WHOLE | changes).encode(), 1000), Record)


def test_what_fits_is_read() -> None:
    assert read() == Record("a \ud800 ü", (0, (1 << 32) - 1), 1, 3.0, (1, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"more": 1}, {"text": 1}, {"text": None}, {"ids": [1 << 32]}, {"ids": [-1]}, {"ids": [True]}, {"ids": [1.5]},
        {"ids": "ab"}, {"size": 0}, {"size": 1 << 21}, {"size": True}, {"at": float("nan")}, {"at": float("inf")},
        {"at": "3"}, {"span": [1]}, {"span": [1, 2, 3]}, {"span": [1, (1 << 53) + 1]}, {"span": {"0": 1}},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        read(**changes)
    assert "more" in changes or next(iter(changes)) in str(refused.value), "the field is named"


@pytest.mark.parametrize("text", ["[1]", "1", '{"a": ', "[" * 100_000, '{"text": "' + "x" * 2000 + '"}', "{" * 600])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_object(text.encode(), 1000)
