"""What disks do beside flipping bits: sectors of zeros or noise, writes that went elsewhere, writes that never
happened.

A lost write can leave a consistent older state, which nothing in the file tells from the newest. So what is asked here
is that whatever reads was once put under its key, and that nothing ends the process or keeps it for ever.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, StoreError, salvage, verify
from children import Ended, outcomes
from ledger import Ledger
from page_map import page_map
from small_chunks import Operation, key_of, make_chunk, read_chunk

SECTOR, PAGE = 512, 4096
SEEDS = range(40)
VERSIONS = 3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], list[int]]:
    """data.mdb after each of some operations, and the pages of the last one that lead to records."""
    path, images = tmp_path_factory.mktemp("images") / "store", []
    steps = [Operation("put", tuple(SEEDS[n : n + 10]), 0) for n in range(0, 40, 10)]
    steps += [Operation("document", tuple(SEEDS[5:25]), source="0/a.md"), Operation("remove", tuple(SEEDS[::7]))]
    steps += [Operation("put", tuple(SEEDS[n::6]), version) for n in (0, 3) for version in (1, 2)]
    with ChunkStore.open(path, mode="write") as store:
        for step in steps:
            step.perform(store)
            images.append((path / "data.mdb").read_bytes())
    kinds, _ = page_map(path / "data.mdb")
    return images, [n for kind in ("meta", "branch", "leaf", "free list") for n in kinds[kind]]


def damaged(rng: random.Random, images: list[bytes], tree_pages: list[int]) -> tuple[str, bytes]:
    """Yield (kind of damage, the newest image with this damage in one to three places)."""
    image = bytearray(images[-1])
    pages = len(image) // PAGE
    how = rng.choice(("zeros", "noise", "misdirected", "lost", "shifted"))
    for _ in range(rng.randint(1, 3)):
        page = rng.choice(tree_pages) if rng.random() < 0.6 else rng.randrange(pages)
        at, sector = page * PAGE, page * PAGE + rng.randrange(8) * SECTOR
        if how == "zeros":
            image[sector : sector + SECTOR] = bytes(SECTOR)
        elif how == "noise":
            image[sector : sector + SECTOR] = rng.randbytes(SECTOR)
        elif how == "misdirected":
            other = rng.choice(tree_pages) * PAGE if rng.random() < 0.5 else rng.randrange(pages) * PAGE
            image[at : at + PAGE] = image[other : other + PAGE]
        elif how == "lost":
            old = rng.choice(images[:-1])
            image[at : at + PAGE] = old[at : at + PAGE].ljust(PAGE, b"\0")
        else:
            image[sector : sector + SECTOR] = image[sector + 8 : sector + SECTOR] + bytes(8)
    return how, bytes(image)


def read_all(store: ChunkStore) -> int:
    """How many chunks read; read_chunk compares each with what was put under its key."""
    good = 0
    with store.read() as reader:
        for key in {*map(key_of, SEEDS)}:
            try:
                manifest = reader.manifest(key)
                if manifest is not None:
                    seed, version = read_chunk(reader, manifest)
                    assert seed in SEEDS
                    assert version in range(VERSIONS)
                    good += 1
            except StoreError:
                pass
    return good


def use(path: Path, *, write: bool) -> str:
    """Read, audit, write and repair as a user may. Return the outcome."""
    try:
        with ChunkStore.open(path, lock_timeout=2) as store:
            read_all(store)
            sound = verify(store).ok
    except StoreError:
        sound = False
    if write:
        try:
            with ChunkStore.open(path, mode="write", lock_timeout=2) as store:
                store.put_chunks([make_chunk(seed, 2) for seed in SEEDS[:6]])
                store.remove_chunks([key_of(seed) for seed in SEEDS[30:33]])
        except StoreError:
            pass
    try:
        try:
            store = ChunkStore.open(path, mode="write", lock_timeout=2)
        except StoreError:
            salvage(path, lock_timeout=2)
            store = ChunkStore.open(path, mode="write", lock_timeout=2)
    except StoreError:
        return "beyond repair"
    with store:
        verify(store, repair=True)
        report = verify(store)
        assert report.ok, f"after a repair: {report.findings[:3]}"
        read_all(store)
        store.put_chunks([make_chunk(seed, 0) for seed in SEEDS])
        assert read_all(store) == len(SEEDS)
        assert verify(store).ok
    return "consistent" if sound else "found and repaired"


@pytest.mark.parametrize("count", [24, pytest.param(2000, marks=pytest.mark.torture)])
def test_bad_sectors_and_lost_writes(
    tmp_path: Path, images: tuple[list[bytes], list[int]], count: int, ledger: Ledger
) -> None:
    def work(number: int) -> list[str]:
        path = tmp_path / "store"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        how, image = damaged(random.Random(f"{count} {number}"), *images)
        (path / "data.mdb").write_bytes(image)
        return [how, use(path, write=number % 3 == 0)]

    bad, seen = [], Counter[str]()
    for number, outcome in outcomes(work, range(count), timeout=60):
        if isinstance(outcome, Ended):
            bad.append((number, str(outcome)[:300]))
        else:
            seen[outcome[1]] += 1
    assert not bad, f"{len(bad)} of {count}:\n" + "\n".join(map(str, bad[:8]))
    assert seen["found and repaired"] > count // 3
    ledger.add("bad sectors, misdirected and lost writes", images=count, wrong_data=0, signals=0, hangs=0, **seen)
