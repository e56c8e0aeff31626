"""Many processes at once: no error a user sees, and nothing that a killed reader leaves behind keeps space."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, StoreStats, stats, verify
from children import Child
from ledger import Ledger
from small_chunks import key_of, make_chunk, operation, read_chunk, read_contents

Acknowledge = Callable[[], None]


def _write(path: Path, writer: int, count: int) -> Callable[[Acknowledge], None]:
    def work(acknowledge: Acknowledge) -> None:
        with ChunkStore.open(path, mode="write") as store:
            for number in range(count):
                operation(writer, number, num_seeds=50 + number).perform(store)
                acknowledge()

    return work


def _read(path: Path, number: int, count: int) -> Callable[[Acknowledge], None]:
    """Every other reader with two threads."""

    def work(acknowledge: Acknowledge) -> None:
        failed: list[BaseException] = []

        def loop(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(count):
                    with store.read() as reader:
                        keys = list(reader.keys_from(rng.randbytes(1)))
                        for key in keys[:8]:
                            manifest = reader.manifest(key)
                            assert manifest is not None
                            read_chunk(reader, manifest)
                    acknowledge()
            except BaseException as error:
                failed.append(error)
                raise

        with ChunkStore.open(path) as store:
            threads = [threading.Thread(target=loop, args=(n,)) for n in range(1 + number % 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]

    return work


@pytest.mark.parametrize("count", [8, pytest.param(400, marks=pytest.mark.torture)])
def test_readers_and_writers_at_once(tmp_path: Path, count: int, ledger: Ledger) -> None:
    path = tmp_path / "store"
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in range(8)])
    writers = [Child(_write(path, w, count)) for w in range(1, 5)]
    readers = [Child(_read(path, r, count)) for r in range(16)]
    ended = [child.wait(60 + 4 * count) for child in (*writers, *readers)]
    assert [code for code, _ in ended] == [0] * 20
    writes, reads = (sum(count for _, count in group) for group in (ended[:4], ended[4:]))
    assert (writes, reads) == (4 * count, 24 * count), ended  # every other reader has two threads
    with ChunkStore.open(path, mode="write") as store:
        assert verify(store).ok
        read_contents(store)
    ledger.add("16 readers, 4 writers", errors=0, writes=writes, reads=reads)


def _die_reading(path: Path) -> Callable[[Acknowledge], None]:
    def work(acknowledge: Acknowledge) -> None:
        with ChunkStore.open(path) as store, store.read() as reader:
            assert reader.manifest(key_of(0)) is not None
            acknowledge()
            os.kill(os.getpid(), 9)

    return work


@pytest.mark.parametrize(
    ("writer", "num_readers", "most"),
    [
        ("stays", 20, 1.5),
        pytest.param("stays", 1000, 1.7, marks=pytest.mark.torture),
        pytest.param("opens anew", 1000, 1.7, marks=pytest.mark.torture),
    ],
)
def test_killed_readers_keep_no_space(
    tmp_path: Path, writer: str, num_readers: int, most: float, ledger: Ledger
) -> None:
    """Readers die inside a transaction, each holding a snapshot, while chunks are replaced again and again: the file is
    as large as where nobody reads. most: of the file over what is in use, which grows by a hundred commits without any
    reader, too."""
    alone, crowded = (
        _replaced(tmp_path / name, writer, num_readers, die=name == "crowded") for name in ("alone", "crowded")
    )
    assert crowded.used_bytes == alone.used_bytes
    ratio = crowded.file_bytes / alone.file_bytes
    assert ratio < 1.1, (crowded, alone)
    assert crowded.file_bytes < most * crowded.used_bytes, crowded
    ledger.add(
        f"readers killed in a transaction, the writer {writer}", readers=num_readers, file_over_without=round(ratio, 3)
    )


def _replaced(path: Path, writer: str, num_readers: int, *, die: bool) -> StoreStats:
    """Return the sizes of a store whose chunks were replaced behind every tenth of the readers, and three times after
    the last."""
    seeds = range(120)
    with ChunkStore.open(path, mode="write") as store:
        for start in range(0, 120, 20):
            store.put_chunks([make_chunk(seed) for seed in seeds[start : start + 20]])
    staying = ChunkStore.open(path, mode="write") if writer == "stays" else None
    for number in range(num_readers):
        if die:
            assert Child(_die_reading(path)).wait() == (-9, 1)
        if number % 10 == 9:
            with nullcontext(staying) if staying else ChunkStore.open(path, mode="write") as store:
                store.put_chunks([make_chunk(seed, number + 1) for seed in seeds[number // 10 % 10 :: 10]])
    with staying or ChunkStore.open(path, mode="write") as store:
        for round_ in range(3):
            for start in range(0, 120, 12):
                store.put_chunks([make_chunk(seed, 1000 + round_) for seed in seeds[start : start + 12]])
        assert verify(store).ok
        assert store._environment()._lmdb.reader_check() == 0
        return stats(store)
