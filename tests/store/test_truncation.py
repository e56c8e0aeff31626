"""A data.mdb cut off at every page: an error and no signal, never a new empty store, and what still reads is
rescued."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, StoreCorrupt, StoreError, StoreFormat, salvage, verify
from cacheblend_store.lmdb_file.pages.commits import salvageable
from children import Ended, outcomes
from ledger import Ledger
from small_chunks import Operation, key_of, make_chunk, read_chunk, read_contents

SEEDS = tuple(range(24))
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with free pages and replaced chunks, so that old pages lie behind new ones."""
    path = tmp_path_factory.mktemp("whole") / "store"
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in SEEDS])
        Operation("document", SEEDS[:9], source="0/a.md").perform(store)
        store.remove_chunks([key_of(seed) for seed in SEEDS[20:]])
        store.put_chunks([make_chunk(seed, 1) for seed in SEEDS[4:8]])
    return path


def sizes(data: Path) -> list[int]:
    whole = data.stat().st_size
    return [*range(0, whole, PAGE), *range(PAGE // 2, whole, 7 * PAGE), whole - 1]


def copy(whole: Path, path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    return path


def chunks_of(store: ChunkStore) -> dict[int, int]:
    return read_contents(store).chunks


def run(work: object, items: list[int]) -> Counter[str]:
    seen = Counter[str]()
    for size, outcome in outcomes(work, items, timeout=60):  # type: ignore[arg-type]
        assert not isinstance(outcome, Ended), f"cut to {size} bytes: {outcome}"
        seen[outcome] += 1
    return seen


@pytest.mark.parametrize("rescued", [8, pytest.param(1, marks=pytest.mark.torture)])
def test_a_cut_file_is_refused_or_rescued(whole: Path, tmp_path: Path, rescued: int, ledger: Ledger) -> None:
    """Every length is refused, and every so many-th rescued."""
    with ChunkStore.open(whole) as store:
        expected = chunks_of(store)

    items = sizes(whole / "data.mdb")

    def work(size: int) -> str:
        path = copy(whole, tmp_path / "store")
        os.truncate(path / "data.mdb", size)
        for mode in ("read", "write"):
            with pytest.raises((StoreCorrupt, StoreFormat)) as refused:
                ChunkStore.open(path, mode=mode)  # type: ignore[arg-type]
            assert refused.value.hint
        assert (path / "data.mdb").stat().st_size == size
        if items.index(size) % rescued:
            return "refused"
        try:
            report = salvage(path)
        except StoreError:
            assert (path / "data.mdb").stat().st_size == size  # what cannot be rescued is left as it is
            return "beyond repair"
        with ChunkStore.open(path, mode="write") as store:
            found = chunks_of(store)
            ever = {(seed, 0) for seed in SEEDS} | expected.items()  # replaced KV of the same tokens is right, too
            assert found.items() <= ever
            assert report.chunks == len(found)
            assert verify(store).ok
            store.put_chunks([make_chunk(seed, 1) for seed in SEEDS])
            assert chunks_of(store) == dict.fromkeys(SEEDS, 1)
        return "rescued some" if found else "rescued none"

    seen = run(work, items)
    assert seen["rescued some"] > 2
    assert seen["beyond repair"] < 5
    ledger.add("truncations", lengths=len(items), signals=0, wrong_data=0, **seen)


def test_a_file_cut_while_it_is_open_is_an_error(whole: Path, tmp_path: Path) -> None:
    """The map still reaches behind the file's end; every transaction looks at the length first."""

    def work(size: int) -> str:
        path = copy(whole, tmp_path / "store")
        with ChunkStore.open(path, mode="write") as store:
            assert len(chunks_of(store)) == 20
            os.truncate(path / "data.mdb", size)
            with pytest.raises(StoreCorrupt):
                chunks_of(store)
            with pytest.raises(StoreCorrupt):
                store.put_chunk(*make_chunk(30))
            assert (path / "data.mdb").stat().st_size == size
        return "refused"

    items = sizes(whole / "data.mdb")
    assert run(work, items) == {"refused": len(items)}


def test_a_page_that_is_gone_is_found_before_it_is_read(whole: Path, tmp_path: Path) -> None:
    """A hole of zeros, as a filesystem's repair leaves it, over every page in turn."""

    def work(at: int) -> str:
        path = copy(whole, tmp_path / "store")
        with (path / "data.mdb").open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes(PAGE))
        lost, found = 0, 0
        try:
            with ChunkStore.open(path) as store, store.read() as reader:
                for seed in SEEDS[:20]:
                    try:
                        manifest = reader.manifest(key_of(seed))
                        found += manifest is not None and read_chunk(reader, manifest) is not None
                    except StoreError:
                        lost += 1
            with ChunkStore.open(path) as store:
                assert found == 20 or not verify(store).ok
        except StoreError:
            return "refused"
        return "harmless" if found == 20 else "lost some" if found else "lost all"

    items = list(range(0, (whole / "data.mdb").stat().st_size, PAGE))
    seen = run(work, items)
    assert seen["lost some"] > 5
    assert seen["harmless"] > 0


def free_tail(path: Path) -> tuple[int, int]:
    """The last page in use, and how many pages there are."""
    data = path / "data.mdb"
    with data.open("rb") as file:
        newest = salvageable(file.fileno(), path)
        free = {page for pages in newest.free_pages() for page in pages}
    return max(set(range(newest.meta.next_pgno)) - free), newest.meta.next_pgno


def test_free_pages_need_not_be_in_the_file(tmp_path: Path) -> None:
    """A commit does not write pages that it took at the file's end and gave back: the file may end before them."""
    path, left = tmp_path / "store", set(SEEDS)
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in SEEDS])
        for seed in reversed(SEEDS):
            used, count = free_tail(path)
            if used + 1 < count:
                break
            store.remove_chunks([key_of(seed)])
            left.remove(seed)
    assert used + 1 < count, "the file ends in free pages"
    os.truncate(path / "data.mdb", (used + 1) * PAGE)
    with ChunkStore.open(path, mode="write") as store:
        assert set(chunks_of(store)) == left
        store.put_chunks([make_chunk(seed) for seed in SEEDS])
    with ChunkStore.open(path) as store:
        assert set(chunks_of(store)) == set(SEEDS)
    used, _ = free_tail(path)
    os.truncate(path / "data.mdb", used * PAGE)
    with pytest.raises(StoreCorrupt), ChunkStore.open(path):
        pass
