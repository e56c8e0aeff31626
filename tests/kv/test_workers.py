"""The threads that load: made once, each with its own number of torch's threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from cacheblend_cli.kv.load_queue import num_workers, workers


def test_every_worker_runs_torch_alone_and_nobody_else_does() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made, together, seen = workers.__wrapped__(4), threading.Barrier(4), list[tuple[str, int]]()

        def work() -> None:
            together.wait(timeout=30)  # four threads are in it at once
            seen.append((threading.current_thread().name, torch.get_num_threads()))

        for running in [made.submit(work) for _ in range(4)]:
            running.result(timeout=30)
        assert len({name for name, _ in seen}) == 4
        assert {count for _, count in seen} == {1}
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), later) == (3, [3])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "at_most", "count"), [(1, 4, 1), (2, 4, 1), (6, 4, 3), (64, 4, 4), (64, 8, 8), (None, 4, 1)]
)
def test_half_of_the_cores_load(cores: int | None, at_most: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert num_workers(at_most) == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_workers_of_its_own() -> None:
    workers(1).submit(lambda: None).result(timeout=30)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            workers(1).submit(lambda: None).result(timeout=30)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
