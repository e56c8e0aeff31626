"""The queue between loading threads and the computing thread."""

from __future__ import annotations

import threading
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.kv.load_queue import LoadQueue


def parts_of(num_groups: int, num_chunks: int) -> list[tuple[int, int]]:
    return list(product(range(num_groups), range(num_chunks)))


def test_groups_are_taken_one_after_another() -> None:
    queue = LoadQueue(parts_of(2, 3))
    assert [queue.take() for _ in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), None]
    assert queue.is_taken


def test_a_part_that_may_not_begin_holds_up_those_behind_it() -> None:
    queue = LoadQueue([(0, 0), (1, 0), (0, 1)])
    assert [queue.take(lambda part: part[0] == 0) for _ in range(2)] == [(0, 0), None]
    assert not queue.is_taken
    assert queue.take() == (1, 0)


@given(st.permutations(list(range(4))))
def test_a_group_is_there_with_its_last_chunk(order: list[int]) -> None:
    queue, there = LoadQueue(parts_of(2, 4)), threading.Event()
    waiting = threading.Thread(target=lambda: (queue.wait(1), there.set()))
    waiting.start()
    for _ in order[:-1]:
        queue.arrived(1)
    queue.arrived(0)
    assert not there.is_set()
    assert not queue.is_ready(1)
    queue.arrived(1)
    assert queue.is_ready(1)
    waiting.join(timeout=30)
    assert there.is_set()


def test_the_first_error_reaches_whoever_waits_and_nothing_more_is_taken() -> None:
    queue = LoadQueue(parts_of(3, 2))
    queue.arrived(0)
    queue.arrived(0)
    queue.stop(KeyError("first"))
    queue.stop(ValueError("second"))
    assert queue.take() is None
    for layer in range(3):  # one that is there too: what was loaded with it may be bad
        with pytest.raises(KeyError, match="first"):
            queue.wait(layer)


def test_what_is_stopped_without_an_error_keeps_what_is_there() -> None:
    queue = LoadQueue(parts_of(2, 1))
    queue.arrived(0)
    queue.stop()
    queue.wait(0)
    assert queue.take() is None
