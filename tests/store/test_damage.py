"""Flipped bits and cut files: what is damaged is found or harmless, never a wrong answer, a signal or a hang."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore, StoreCorrupt, StoreError, StoreFormat, compact, salvage, verify
from cacheblend_store.lmdb_file.pages.layout import Branch
from children import Ended, outcomes
from ledger import Ledger
from page_map import page_map, pages_by_level
from small_chunks import Contents, Operation, key_of, make_chunk, read_chunk

NUM_CHUNKS = 48
NEW = (5000, 5001, 5002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents]:
    """A store with branch, leaf, value and free pages, and what is in it."""
    path, contents = tmp_path_factory.mktemp("whole") / "store", Contents()
    with ChunkStore.open(path, mode="write") as store:
        steps = [Operation("put", tuple(range(n, n + 16)), 1) for n in range(0, NUM_CHUNKS, 16)]
        steps += [Operation("document", tuple(range(n, n + 24)), source=f"0/{n}.md") for n in range(0, NUM_CHUNKS, 24)]
        steps += [Operation("remove", tuple(range(7, NUM_CHUNKS, 9))), Operation("put", tuple(range(3, 30, 5)), 2)]
        for step in steps:
            step.perform(store)
            contents = step.expect(contents)
        assert read_chunks(store) == (contents.chunks, 0)
    return path, contents


def read_chunks(store: ChunkStore) -> tuple[dict[int, int], int]:
    """(chunks that read, how many said that they are damaged). Raises WrongData, and StoreError without a list of
    keys."""
    found, damaged = {}, 0
    with store.read() as reader:
        for key in {*reader.keys_from(b""), *map(key_of, range(NUM_CHUNKS))}:
            try:
                manifest = reader.manifest(key)
                if manifest is not None:
                    seed, version = read_chunk(reader, manifest)
                    if manifest.has_kv:
                        found[seed] = version
            except StoreError:
                damaged += 1
    return found, damaged


def _use(path: Path, contents: Contents, then: str) -> dict[str, int]:
    """What a user meets who reads everything, verifies, and then writes, repairs, or neither. Counts of what was
    seen."""
    seen = Counter[str]()
    try:
        with ChunkStore.open(path, lock_timeout=2) as store:
            found, damaged = read_chunks(store)
            assert found.items() <= contents.chunks.items(), "a chunk reads that was not there"
            detected = damaged > 0 or not verify(store).ok
            assert detected or found == contents.chunks, "chunks are lost and nothing said so"
    except StoreError:
        detected = True
    seen["detected" if detected else "harmless"] += 1
    if then == "write":
        _write(path, contents)
    if then != "nothing":
        _repair(path, contents, seen)
    return seen


def _write(path: Path, contents: Contents) -> None:
    """Put and remove, what is there too, and compact; an error may say why not."""
    old = sorted(contents.chunks.items())[::2]
    try:
        with ChunkStore.open(path, mode="write", lock_timeout=2) as store:
            store.put_chunks([make_chunk(seed, 9) for seed in NEW])
            store.remove_chunks(map(key_of, NEW))
            store.remove_chunks(key_of(seed) for seed, _ in old)
            store.put_chunks([make_chunk(*chunk) for chunk in old])
            compact(store)
    except StoreError:
        pass


def _repair(path: Path, contents: Contents, seen: Counter[str]) -> None:
    """Afterwards the store is sound, holds only what was once put, and takes more."""
    try:
        store = ChunkStore.open(path, mode="write", lock_timeout=2)
    except StoreError:
        try:
            salvage(path, lock_timeout=2)
        except StoreError:
            seen["beyond repair"] += 1
            return
        store = ChunkStore.open(path, mode="write", lock_timeout=2)
    with store:
        verify(store, repair=True)
        report = verify(store)
        assert report.ok, f"after a repair: {report.findings[:3]}"
        found, damaged = read_chunks(store)
        assert not damaged
        seen["repaired"] += 1
        seen["chunks lost in repairs"] += len(contents.chunks.keys() - found.keys())
        store.put_chunks([make_chunk(seed, 9) for seed in NEW])
        assert verify(store).ok


def _flips(path: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    """(kind of page, byte, bit) of `count` flips, the kinds in turn and more often in a page's header and last
    bytes."""
    kinds, page_size = page_map(path / "data.mdb")
    assert all(kinds[kind] for kind in ("meta", "branch", "leaf", "value", "free list", "free"))
    rng, names, flips = random.Random(seed), ("value", "leaf", "branch", "meta", "free list"), []
    for n in range(count):
        kind = names[n % len(names)]
        near = (page_size, 64, 168)[n // len(names) % 3]
        flips.append((kind, rng.choice(kinds[kind]) * page_size + rng.randrange(near), rng.randrange(8)))
    return flips


@pytest.mark.parametrize("num_flips", [48, pytest.param(10_000, marks=pytest.mark.torture)])
def test_a_flipped_bit_is_found_or_harmless(
    tmp_path: Path, whole: tuple[Path, Contents], num_flips: int, ledger: Ledger
) -> None:
    source, contents = whole
    original = (source / "data.mdb").read_bytes()

    def work(flip: tuple[int, str, int, int]) -> dict[str, int]:
        number, _, at, bit = flip
        path = tmp_path / "store"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        image = bytearray(original)
        image[at] ^= 1 << bit
        (path / "data.mdb").write_bytes(image)
        return _use(path, contents, {0: "write", 4: "repair"}.get(number % 8, "nothing"))

    bad, totals = [], Counter[str]()
    flips = [(n, *flip) for n, flip in enumerate(_flips(source, num_flips, seed=num_flips))]
    for flip, outcome in outcomes(work, flips, timeout=60):
        if isinstance(outcome, Ended):
            bad.append((flip, str(outcome)[:300]))
        else:
            totals.update(outcome)
    assert not bad, f"{len(bad)} of {num_flips}:\n" + "\n".join(map(str, bad[:10]))
    assert totals["detected"] > num_flips // 4
    ledger.add("single-bit flips", flips=num_flips, wrong_data=0, signals=0, hangs=0, **totals)


@pytest.mark.parametrize("fields", [range(136, 152, 2), pytest.param(range(176), marks=pytest.mark.torture)])
def test_every_bit_of_the_meta_pages(
    tmp_path: Path, whole: tuple[Path, Contents], fields: range, ledger: Ledger
) -> None:
    """Every other byte of the last page and of the number of the commit; in torture all that LMDB reads of them."""
    source, contents = whole
    original = (source / "data.mdb").read_bytes()
    _, page_size = page_map(source / "data.mdb")

    def work(flip: tuple[int, int]) -> dict[str, int]:
        path = tmp_path / "store"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        image = bytearray(original)
        image[flip[0]] ^= 1 << flip[1]
        (path / "data.mdb").write_bytes(image)
        return _use(path, contents, "nothing")

    flips, totals = [(p * page_size + at, bit) for p in (0, 1) for at in fields for bit in range(8)], Counter[str]()
    for flip, outcome in outcomes(work, flips, timeout=60):
        assert not isinstance(outcome, Ended), (flip, outcome)
        totals.update(outcome)
    assert totals["detected"] > len(flips) // 4
    ledger.add("every bit of the meta pages", flips=len(flips), wrong_data=0, signals=0, **totals)


@pytest.mark.parametrize("page", [0, 1])
def test_a_meta_page_cannot_pass_for_a_newer_one(tmp_path: Path, whole: tuple[Path, Contents], page: int) -> None:
    """Its number changed so that the older of the two seems to be the newest: the last commit would be lost."""
    source, contents = whole
    path = tmp_path / "store"
    shutil.copytree(source, path)
    _, page_size = page_map(path / "data.mdb")
    with (path / "data.mdb").open("r+b") as stream:
        numbers = []
        for at in (144, page_size + 144):
            stream.seek(at)
            numbers.append(int.from_bytes(stream.read(8), "little"))
        older = numbers[page] < numbers[1 - page]
        stream.seek(page * page_size + 144)
        stream.write((numbers[page] + (2 if older else -2)).to_bytes(8, "little"))
    for mode in ("read", "write"):
        with pytest.raises(StoreCorrupt, match="does not belong to the commit"):
            ChunkStore.open(path, mode=mode)
    salvage(path)
    with ChunkStore.open(path, mode="write") as store:
        assert verify(store).ok
        assert read_chunks(store) == (contents.chunks, 0)


def test_a_branch_that_leads_past_a_chunk_is_found_and_mended(tmp_path: Path, whole: tuple[Path, Contents]) -> None:
    """A separator damaged so that a page is still in order: keys between the old and the new one are looked for
    elsewhere."""
    source, contents = whole
    path = tmp_path / "store"
    shutil.copytree(source, path)
    kinds, page_size = page_map(path / "data.mdb")
    image, moved = bytearray((path / "data.mdb").read_bytes()), 0
    for pgno in kinds["branch"]:
        page = memoryview(image)[pgno * page_size : (pgno + 1) * page_size]
        for pointer in range(18, int.from_bytes(page[12:14], "little"), 2):
            at = int.from_bytes(page[pointer : pointer + 2], "little")
            if int.from_bytes(page[at + 6 : at + 8], "little") > 0:
                page[at + 9] += 8 if page[at + 9] < 248 else 0  # the second byte of the key
                moved += 1
        page.release()
    (path / "data.mdb").write_bytes(image)
    assert moved > 2
    with ChunkStore.open(path, mode="write") as store:
        assert not verify(store).ok
        verify(store, repair=True)
        assert verify(store).ok
        found, damaged = read_chunks(store)
        assert found.items() <= contents.chunks.items()
        assert not damaged


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, range]:
    """A store whose trees have three levels, and the seeds of its chunks."""
    path, seeds = tmp_path_factory.mktemp("deep") / "store", range(0, 2100, 3)
    with ChunkStore.open(path, mode="write") as store:
        for first in range(0, len(seeds), 20):  # all at once would fill pages, and two levels hold them
            store.put_chunks([make_chunk(seed) for seed in seeds[first : first + 20]])
        Operation("document", tuple(seeds), source="0/all.md").perform(store)
    return path, seeds


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("database", ["blobs", "chunks"])
def test_a_bad_page_costs_what_is_below_it(tmp_path: Path, deep: tuple[Path, range], database: str, level: int) -> None:
    """level: 0 for the tree's root, 2 for a leaf. What is lost is named, and what is there is right."""
    (whole, seeds), path = deep, tmp_path / "store"
    shutil.copytree(whole, path)
    levels, page_size = pages_by_level(path / "data.mdb", database)
    assert len(levels) == 3
    with (path / "data.mdb").open("r+b") as stream:
        stream.seek(levels[level][len(levels[level]) // 2] * page_size)
        stream.write(bytes(page_size))
    report = salvage(path)
    with ChunkStore.open(path, mode="write") as store:
        assert verify(store).ok
        found, damaged = read_chunks(store)
        assert report.chunks == len(list(store.chunks()))
        assert report.chunks == (len(seeds) if database == "blobs" else len(found)), (
            "the text of chunks without KV stays"
        )
        assert (damaged, report.lost, report.sources) == (0, len(seeds) - len(found), ("0/all.md",))
    assert found.items() <= dict.fromkeys(seeds, 0).items()
    least, most = ((0, 0), (1, len(seeds) - 31), (len(seeds) - 30, len(seeds) - 1))[level]
    assert least <= len(found) <= most


def test_a_rescue_from_the_commit_before_names_what_that_had_not_computed_yet(tmp_path: Path) -> None:
    """Texts are stored before their KV: what the last commit added is lost with it, and its documents are named."""
    path, (manifest, blobs), (evicted, more) = tmp_path / "store", make_chunk(1), make_chunk(2)
    with ChunkStore.open(path, mode="write") as store:
        Operation("document", (1,), source="0/a.md").perform(store)
        store.put_chunk(evicted, more)
        store.evict_chunks([evicted.key])
        store.put_records([manifest])
        store.put_chunk(manifest, blobs)
    levels, page_size = pages_by_level(path / "data.mdb", "blobs")
    with (path / "data.mdb").open("r+b") as stream:
        stream.seek(levels[0][0] * page_size)
        stream.write(bytes(page_size))
    report = salvage(path)
    assert (report.chunks, report.lost) == (2, 1)
    assert [Path(source).name for source in report.sources] == ["a.md"]
    with ChunkStore.open(path, mode="write") as store:
        assert {m.id: m.has_kv for m in store.chunks()} == {manifest.id: False, evicted.id: False}
        assert verify(store).ok


def test_a_damaged_store_of_another_format_is_left_as_it_is(tmp_path: Path, whole: tuple[Path, Contents]) -> None:
    path = tmp_path / "store"
    shutil.copytree(whole[0], path)
    with ChunkStore.open(path, mode="write") as store, bare_writing(store) as (txn, dbs):
        txn.put(b"format_version", b"1", db=dbs["meta"])
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(StoreFormat, match="format 1"):
        salvage(path)
    assert (path / "data.mdb").read_bytes() == before


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        [byte] = stream.read(1)
        stream.seek(at)
        stream.write(bytes((byte ^ 1 << bit,)))


def test_a_value_that_claims_more_pages_takes_none_of_its_neighbours(tmp_path: Path) -> None:
    """LMDB would free as many pages as it claims, and later commits would overwrite the neighbours."""
    path = tmp_path / "store"
    seeds = range(2, 62, 3)  # of several pages each
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in seeds])
        with store.read() as reader:
            [node, *_] = (node for node in reader.pages.nodes("blobs", key_of(2)) if node.big)
            page_size = reader.pages.meta.page_size
    _flip(path / "data.mdb", node.pgno * page_size + 12, 4)  # sixteen more
    with ChunkStore.open(path, mode="write") as store:
        with pytest.raises(StoreCorrupt):
            store.remove_chunks([key_of(2)])
        for seed in range(102, 132, 3):
            store.put_chunk(*make_chunk(seed))
        with store.read() as reader:
            for seed in seeds[1:]:
                manifest = reader.manifest(key_of(seed))
                assert manifest is not None
                assert read_chunk(reader, manifest) == (seed, 0)


def test_taking_chunks_away_walks_no_page_that_was_not_checked(tmp_path: Path, deep: tuple[Path, range]) -> None:
    """All chunks below one branch go, so LMDB takes pages from the next one, whose first leaf is damaged."""
    (whole, seeds), path = deep, tmp_path / "store"
    shutil.copytree(whole, path)
    levels, page_size = pages_by_level(path / "data.mdb", "chunks")
    with ChunkStore.open(path) as store, store.read() as reader:
        tree = reader.pages.tree("chunks")
        assert tree is not None
        root, branch = reader.pages.page_at(tree.root, tree), reader.pages.page_at(levels[1][1], tree)
        assert isinstance(root, Branch)
        assert isinstance(branch, Branch)
        gone, leaf = [key for key in map(key_of, seeds) if key < root.keys[1]], branch.children[0]
    _flip(path / "data.mdb", leaf * page_size + 16, 0)  # where its first node is

    def work(item: None) -> dict[str, int]:
        with ChunkStore.open(path, mode="write") as store, pytest.raises(StoreCorrupt):
            store.remove_chunks(sorted(gone))
        return {}

    [(_, outcome)] = outcomes(work, [None], timeout=60)
    assert not isinstance(outcome, Ended), str(outcome)[:500]
    with ChunkStore.open(path) as store, store.read() as reader:
        assert all(reader.manifest(key) for key in gone)


@pytest.mark.parametrize("bit", [0, 7])
def test_a_damaged_store_is_not_compacted(tmp_path: Path, whole: tuple[Path, Contents], bit: int) -> None:
    """LMDB would copy the target of a damaged pointer, or end in a signal."""
    path = tmp_path / "store"
    shutil.copytree(whole[0], path)
    levels, page_size = pages_by_level(path / "data.mdb", "blobs")
    _flip(path / "data.mdb", levels[-1][0] * page_size + 16 + (bit == 7), bit)
    before = (path / "data.mdb").read_bytes()

    def work(item: None) -> dict[str, int]:
        with ChunkStore.open(path, mode="write") as store, pytest.raises(StoreCorrupt):
            compact(store)
        return {}

    [(_, outcome)] = outcomes(work, [None], timeout=60)
    assert not isinstance(outcome, Ended), str(outcome)[:500]
    assert (path / "data.mdb").read_bytes() == before
