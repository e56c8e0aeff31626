"""A set of keys in few bytes."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest

from cacheblend_cli.collect import key_set
from cacheblend_cli.collect.key_set import KeySet


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=20).digest()


@pytest.mark.parametrize("recent", [1, 7, 1000])
def test_it_is_a_set(monkeypatch: pytest.MonkeyPatch, recent: int) -> None:
    monkeypatch.setattr(key_set, "_RECENT", recent)
    found, there = KeySet(), set[bytes]()
    for number in (*range(0, 300, 2), *range(200)):
        assert found.add(key(number)) == (key(number) not in there)
        there.add(key(number))
    assert len(found) == len(there) == 250
    assert all((key(number) in found) == (key(number) in there) for number in range(400))
    assert {k for k in there if k in KeySet(there)} == there


def test_a_key_takes_eight_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_set, "_RECENT", 256)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        found = KeySet(map(key, range(5120)))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(found) == 5120
    assert 8 * 5120 <= taken < 10 * 5120
