"""Threads for several tenants: the order of their work, what is dropped, and the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from cacheblend_cli.server.fair_pool import FairPool

WAIT_S = 60.0


@contextmanager
def occupied(pool: FairPool, *tenants: str) -> Iterator[None]:
    """A thread is busy with the work of each of these tenants meanwhile."""
    go, began = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        began.release()
        assert go.wait(WAIT_S)

    for tenant in tenants:
        pool.submit(tenant, hold)
        assert began.acquire(timeout=WAIT_S)
    try:
        yield
    finally:
        go.set()


def marks(pool: FairPool, ran: list[str]) -> Callable[[str, str], Future[None]]:
    return lambda tenant, name: pool.submit(tenant, lambda: ran.append(name))


def test_tenants_take_turns_and_each_ones_work_is_in_order() -> None:
    pool, ran = FairPool("test", 1), list[str]()
    submit = marks(pool, ran)
    with occupied(pool, "c"):
        given = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        futures = [submit(name[0], name) for name in given]
    for future in futures:
        future.result(WAIT_S)
    assert ran == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_tenant_has_its_share_of_the_threads() -> None:
    pool, ran = FairPool("test", 2, most_per_tenant=1), list[str]()
    submit = marks(pool, ran)
    with occupied(pool, "a"):
        waiting = [submit("a", "a1"), submit("a", "a2")]
        for name in ("b1", "b2", "c1"):
            submit(name[0], name).result(WAIT_S)
        assert ran == ["b1", "b2", "c1"]
        assert not any(future.running() or future.done() for future in waiting)
    for future in waiting:
        future.result(WAIT_S)
    assert ran[3:] == ["a1", "a2"]


def test_cancelled_work_is_dropped_from_the_queue() -> None:
    pool, ran = FairPool("test", 1), list[str]()
    submit = marks(pool, ran)
    with occupied(pool, "a"):
        futures = [submit(name[0], name) for name in ("a1", "b1", "b2", "c1")]
        assert futures[1].cancel()
        assert futures[3].cancel()
        assert sum(map(len, pool._queues.values())) == 2
    for future in (futures[0], futures[2]):
        future.result(WAIT_S)
    assert ran == ["a1", "b2"]


def test_running_work_is_not_dropped() -> None:
    pool = FairPool("test", 1)
    with occupied(pool, "a"):
        go, began = threading.Event(), threading.Event()
        second = FairPool("other", 1)
        running = second.submit("a", lambda: (began.set(), go.wait(WAIT_S)))
        assert began.wait(WAIT_S)
        assert not running.cancel()
        go.set()
        assert running.result(WAIT_S) == (None, True)


def test_errors_are_those_of_the_work() -> None:
    pool = FairPool("test", 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit("a", lambda: 1 // 0).result(WAIT_S)
    assert pool.submit("a", lambda: 1).result(WAIT_S) == 1


def test_a_closed_pool_drops_everything() -> None:
    pool, ran = FairPool("test", 1), list[str]()
    submit = marks(pool, ran)
    with occupied(pool, "a"):
        queued = [submit("a", "a1"), submit("b", "b1")]
        pool.close()
        late = submit("a", "a2")
        assert [future.cancelled() for future in (*queued, late)] == [True, True, True]
    pool.close(WAIT_S)
    assert ran == []


def test_finished_work_is_not_kept() -> None:
    """Its texts may have megabytes."""
    import weakref

    class Text:
        pass

    pool, text = FairPool("test", 1), Text()
    gone, held = threading.Event(), weakref.ref(text)
    weakref.finalize(text, gone.set)

    def work(text: Text = text) -> None:
        assert text

    pool.submit("a", work).result(WAIT_S)
    del work, text
    assert gone.wait(WAIT_S), held()


def test_a_process_does_not_wait_for_the_threads() -> None:
    program = """
from threading import Event
from cacheblend_cli.server.fair_pool import FairPool
began = Event()
FairPool("test", 1).submit("a", lambda: (began.set(), Event().wait()))
began.wait()
"""
    command: list[Any] = [sys.executable, "-c", program]
    assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 0
