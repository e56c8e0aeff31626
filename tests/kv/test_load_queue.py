"""The queue between loading threads and the computing thread."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.kv.load_queue import LoadQueue


def test_layers_are_taken_one_after_another() -> None:
    queue = LoadQueue(2, 3)
    assert [queue.take() for _ in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), None]


@given(st.permutations(list(range(4))))
def test_a_layer_is_there_with_its_last_chunk(order: list[int]) -> None:
    queue, there = LoadQueue(2, 4), threading.Event()
    waiting = threading.Thread(target=lambda: (queue.wait(1), there.set()))
    waiting.start()
    for _ in order[:-1]:
        queue.arrived(1)
    queue.arrived(0)
    assert not there.is_set()
    queue.arrived(1)
    waiting.join(timeout=30)
    assert there.is_set()


def test_the_first_error_reaches_whoever_waits_and_nothing_more_is_taken() -> None:
    queue = LoadQueue(3, 2)
    queue.arrived(0)
    queue.arrived(0)
    queue.stop(KeyError("first"))
    queue.stop(ValueError("second"))
    assert queue.take() is None
    for layer in range(3):  # one that is there too: what was loaded with it may be bad
        with pytest.raises(KeyError, match="first"):
            queue.wait(layer)


def test_asking_for_a_layer_runs_what_its_parts_have_left() -> None:
    queue, done = LoadQueue(2, 2), list[int]()
    for part in range(2):
        assert not queue.is_ready(0)
        queue.arrived(0, lambda part=part: done.append(part))
    assert queue.is_ready(0)
    assert done == [0, 1]
    assert not queue.is_ready(1)


def test_what_is_stopped_without_an_error_keeps_what_is_there() -> None:
    queue = LoadQueue(2, 1)
    queue.arrived(0)
    queue.stop()
    queue.wait(0)
    assert queue.take() is None
