"""SIGKILL at random moments: what was reported as stored is there, and nothing is there in part."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, verify
from children import Child
from ledger import Ledger
from small_chunks import Contents, operation, read_contents


def _write_on(path: Path, writer: int, start: int) -> Callable[[Callable[[], None]], None]:
    def work(acknowledge: Callable[[], None]) -> None:
        store = ChunkStore.open(path, mode="write")
        number = start
        while True:
            operation(writer, number).perform(store)
            acknowledge()
            number += 1

    return work


class _Expected:
    """What one writer's chunks must be, followed through its kills."""

    def __init__(self, writer: int) -> None:
        self.writer, self.contents, self.number = writer, Contents(), 0

    def follow(self, acknowledged: int, found: Contents) -> None:
        """All acknowledged operations are there, the one after them whole or not at all, and none beyond."""
        for _ in range(acknowledged):
            self.contents = operation(self.writer, self.number).expect(self.contents)
            self.number += 1
        after = operation(self.writer, self.number).expect(self.contents)
        assert found in (self.contents, after), f"writer {self.writer} at operation {self.number}"
        if found != self.contents:
            self.contents, self.number = after, self.number + 1


@pytest.mark.parametrize("num_kills", [16, pytest.param(2000, marks=pytest.mark.torture)])
@pytest.mark.parametrize("num_writers", [1, 4])
def test_killed_writers_lose_nothing_they_reported(
    tmp_path: Path, num_writers: int, num_kills: int, ledger: Ledger
) -> None:
    path, rng = tmp_path / "store", random.Random(num_writers)
    writers = [_Expected(w) for w in range(1, num_writers + 1)]
    kills = acknowledged = 0
    ChunkStore.open(path, mode="write").close()
    while kills < num_kills // 2:
        running = [(Child(_write_on(path, w.writer, w.number)), w) for w in writers]
        try:
            rng.shuffle(running)
            running[-1][0].until(rng.choice((0, 1, 2, 5)))
            time.sleep(rng.uniform(0, 0.04))
            while running:
                time.sleep(rng.uniform(0, 0.005))
                child, writer = running.pop()
                count = child.kill()
                kills, acknowledged = kills + 1, acknowledged + count
                with ChunkStore.open(path) as store:  # while the others still write
                    writer.follow(count, read_contents(store, writer.writer))
        finally:
            for child, _ in running:
                child.kill()
    with ChunkStore.open(path, mode="write") as store:
        report = verify(store)
    assert report.ok, report.findings
    assert acknowledged > kills // 4  # whatever the machine's speed
    ledger.add(f"SIGKILL, {num_writers} writers", kills=kills, acknowledged=acknowledged, lost=0, torn=0)
