"""Any sequence of calls: the store holds what a dict would hold, evicts the KV of what was used longest ago and keeps
its text, and says what is damaged."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, StoreFull, compact, prune, stats, verify
from cacheblend_store.format.keys import blob_key
from cacheblend_store.format.records import encode_manifest
from cacheblend_store.writer import with_digests
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from ledger import Ledger
from small_chunks import LAYERS, Contents, Operation, key_of, make_chunk, read_chunk, read_contents, summary_of

SEEDS = st.integers(0, 11)
SOME = st.lists(SEEDS, min_size=1, max_size=5, unique=True).map(tuple)
SOURCES = st.sampled_from(("0/a.md", "0/b.md", "0/c.md"))
PAGE = os.sysconf("SC_PAGE_SIZE")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nothing here depends on a disk's syncs


def keys_of(seeds: Iterable[int]) -> set[bytes]:
    return {key_of(seed) for seed in seeds}


class StoreMachine(RuleBasedStateMachine):
    """`self.expected` is the model: what was put and neither removed nor orphaned since, with its KV unless that was
    evicted."""

    steps = 0

    @initialize(seeds=st.permutations(range(12)), documents=st.lists(SOME, max_size=2))
    def make(self, seeds: list[int], documents: list[tuple[int, ...]]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.path = self.folder / "store"
        self.store = ChunkStore.open(self.path, mode="write")
        self.expected, self.moment = Contents(), 0
        # seed -> moment, of chunks with KV and of those stored as text; touched: not yet written
        self.uses, self.touched = dict[int, int](), dict[int, int]()
        self.quota, self.identity = 0, self.store.identity
        self.put(tuple(seeds[:8]), 0)
        for source, owned in zip(("0/a.md", "0/b.md"), documents, strict=False):
            self.put_document(source, owned)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    # what a dict does too

    @rule(seeds=SOME, version=st.integers(0, 2), keep=st.lists(SEEDS, max_size=3, unique=True).map(tuple))
    def put(self, seeds: tuple[int, ...], version: int, keep: tuple[int, ...] = ()) -> None:
        self._uses_are_written()
        old = {s: v for s, v in self.expected.chunks.items() if s not in self.expected.without_kv}
        wanted = ["unchanged" if old.get(s) == version else "replaced" if s in old else "new" for s in seeds]
        new = {s: with_digests(*make_chunk(s, version)) for s in seeds}
        gone = self._evicted({s: m.num_bytes + len(encode_manifest(m)) for s, m in new.items()}, keep)
        chunks = [make_chunk(seed, version) for seed in seeds]
        if gone is None:
            with pytest.raises(StoreFull, match="quota"):
                self.store.put_chunks(chunks, keep=keys_of(keep))
            return
        assert self.store.put_chunks(chunks, keep=keys_of(keep)) == wanted
        self._free(gone)
        self._expect(Operation("put", seeds, version))
        for seed, status in zip(seeds, wanted, strict=True):
            if status != "unchanged":
                self.uses[seed] = self._now()

    @rule(seeds=SOME, version=st.integers(0, 2))
    def put_records(self, seeds: tuple[int, ...], version: int) -> None:
        self._uses_are_written()
        self.store.flush_touches()
        manifests = [make_chunk(seed, version)[0] for seed in seeds]
        new = [seed for seed in seeds if seed not in self.expected.chunks]
        there = self._sizes()
        sizes = {s: there.get(s) or len(encode_manifest(m.without_kv())) for s, m in zip(seeds, manifests, strict=True)}
        gone = self._evicted(sizes)
        if gone is None:
            with pytest.raises(StoreFull, match="quota"):
                self.store.put_records(manifests)
            return
        assert self.store.put_records(manifests) == len(new)
        self._free(gone)
        self._expect(Operation("records", seeds, version))
        self.uses |= {seed: self._now() for seed in new}

    @rule(seeds=SOME)
    def evict(self, seeds: tuple[int, ...]) -> None:
        assert self.store.evict_chunks(keys_of(seeds)) == len(self._with_kv() & set(seeds))
        self._expect(Operation("evict", seeds))

    @rule(seeds=SOME)
    def remove(self, seeds: tuple[int, ...]) -> None:
        there = sum(seed in self.expected.chunks for seed in seeds)
        assert self.store.remove_chunks([key_of(seed) for seed in seeds]) == there
        self._expect(Operation("remove", seeds))

    @rule(source=SOURCES, seeds=st.lists(SEEDS, max_size=6, unique=True).map(tuple))
    def put_document(self, source: str, seeds: tuple[int, ...]) -> None:
        sizes, step = self._sizes(), Operation("document", seeds, source=source)
        step.perform(self.store)
        self._expect(step)
        gone = self._evicted({}, sizes={seed: sizes[seed] for seed in self.expected.chunks})
        self._free(self._by_last_use() if gone is None else gone)  # texts of documents stay

    @rule(source=SOURCES)
    def forget_document(self, source: str) -> None:
        step = Operation("forget", source=source)
        step.perform(self.store)
        self._expect(step)

    @rule(source=SOURCES)
    def summarise(self, source: str) -> None:
        seeds = self.expected.documents.get(source)
        kept = self.store.put_summaries([summary_of(source, seeds or ())])
        assert kept == (seeds is not None and set(seeds) <= self._with_kv())

    # last uses and the quota

    @rule(seeds=SOME)
    def touch(self, seeds: tuple[int, ...]) -> None:
        self.store.touch(key_of(seed) for seed in seeds[:1])  # of several at one moment the order is not said
        self.touched[seeds[0]] = self._now()

    @rule()
    def flush(self) -> None:
        self.store.flush_touches()
        self._uses_are_written()

    @rule(pages=st.sampled_from((0, 6, 12, 24, 36)))
    def set_quota(self, pages: int) -> None:
        """KV beyond the quota is evicted at once."""
        self._uses_are_written()
        self.quota = pages * PAGE
        gone = self._evicted({})
        self._free(self._by_last_use() if gone is None else gone)  # texts of documents stay
        self.store.set_max_bytes(self.quota)
        assert self.store.max_bytes == self.quota

    @rule(keep=st.integers(0, 8))
    def prune_to_size(self, keep: int) -> None:
        sizes = {s: m.num_bytes for s, m in self._manifests().items()}
        used = [s for s in self._by_last_use() if s in self._with_kv()]
        stay, gone = used[max(0, len(used) - keep) :], used[: max(0, len(used) - keep)]
        report = prune(self.store, to_bytes=sum(sizes[s] for s in stay))
        assert (set(report.evicted), report.keys) == ({key_of(s) for s in gone}, ())
        assert report.bytes == sum(sizes[s] for s in gone)
        self._expect(Operation("evict", tuple(gone)))

    @rule()
    def prune_orphans(self) -> None:
        owned = {s for seeds in self.expected.documents.values() for s in seeds}
        gone = tuple(s for s in self.expected.chunks if s not in owned)
        assert set(prune(self.store, orphans=True).keys) == {key_of(s) for s in gone}
        self._expect(Operation("remove", gone))

    # upkeep, other handles, damage

    @rule()
    def reopen(self) -> None:
        self.store.close()  # leaving `with` would write the noted uses; this forgets them
        self.touched.clear()
        self.store = ChunkStore.open(self.path, mode="write")

    @rule()
    def compact(self) -> None:
        before, after = compact(self.store)
        assert after <= before

    @rule()
    def another_handle_sees_the_same(self) -> None:
        with ChunkStore.open(self.path) as other:
            assert read_contents(other) == self.expected

    @rule(seeds=SOME, version=st.integers(3, 4))
    def a_transaction_sees_what_was_there_when_it_began(self, seeds: tuple[int, ...], version: int) -> None:
        """And holds what it saw while chunks are replaced."""
        with self.store.read() as reader:
            before = dict(self.expected.chunks)
            self.put(seeds, version)
            assert dict(read_chunk(reader, reader.manifest(key_of(s))) for s in before) == before

    @rule(seed=SEEDS, layer=st.integers(0, LAYERS - 1), how=st.sampled_from(("flip", "cut", "gone")))
    def damage_a_blob(self, seed: int, layer: int, how: str) -> None:
        """It is a miss until it is put again; an audit names it; a repair drops the KV and keeps the text."""
        if seed not in self._with_kv():
            return
        name = blob_key(key_of(seed), layer)
        with bare_writing(self.store) as (txn, dbs):
            blob = bytearray(txn.get(name, db=dbs["blobs"]))
            blob[-1] ^= 16
            if how == "gone":
                txn.delete(name, db=dbs["blobs"])
            else:
                txn.put(name, bytes(blob) if how == "flip" else bytes(blob[:-4]), db=dbs["blobs"])
        with self.store.read() as reader, pytest.raises(BadBlob):
            read_chunk(reader, reader.manifest(key_of(seed)))
        report = verify(self.store, repair=True)
        assert {f.key for f in report.findings if f.kind == "blob"} == {key_of(seed)}
        self._expect(Operation("evict", (seed,)))

    # at all times

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        type(self).steps += 1
        assert read_contents(self.store) == self.expected
        for seed in range(12):
            manifest = self.store.get_chunk(key_of(seed))
            assert (manifest is not None) == (seed in self.expected.chunks)
            if manifest is not None:
                assert self.store.resolve(manifest.id) == manifest.key
                assert manifest.has_kv == self.store.has_kv(manifest.key) == (seed not in self.expected.without_kv)
        assert {m.key for m in self.store.chunks()} == {key_of(s) for s in self.expected.chunks}
        assert self._with_kv() <= set(self.uses) <= set(self.expected.chunks)
        assert self.store.identity == self.identity

    @invariant()
    def a_summary_is_of_a_document_with_all_its_kv(self) -> None:
        if hasattr(self, "store"):
            with self.store.read() as reader:
                found = {summary.source: summary for summary in reader.summaries()}
            for source, summary in found.items():
                seeds = self.expected.documents[source]
                assert (summary.keys, summary.updated) == (summary_of(source, seeds).keys, 1.0)
                assert set(seeds) <= self._with_kv()

    @invariant()
    def counts_and_audit_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        manifests, found = list(self._manifests().values()), stats(self.store)
        owned = {s for seeds in self.expected.documents.values() for s in seeds}
        texts = sum(size for s, size in self._sizes().items() if s in owned - self._with_kv())
        assert not self.quota or found.quota_bytes <= self.quota + texts + found.document_bytes
        assert found.quota_bytes == sum(self._sizes().values()) + self._document_bytes()
        assert (found.chunks, found.documents) == (len(manifests), len(self.expected.documents))
        assert found.live_bytes == sum(m.num_bytes for m in manifests)
        assert found.used_bytes >= found.live_bytes
        report = verify(self.store)
        assert (report.ok, report.without_kv) == (True, len(self.expected.without_kv))

    # the model

    def _manifests(self) -> dict[int, ChunkManifest]:
        found = {s: with_digests(*make_chunk(s, v)) for s, v in self.expected.chunks.items()}
        return {s: m.without_kv() if s in self.expected.without_kv else m for s, m in found.items()}

    def _with_kv(self) -> set[int]:
        return set(self.expected.chunks) - self.expected.without_kv

    def _sizes(self) -> dict[int, int]:
        """Bytes of each chunk, KV and record, that count in the quota."""
        with self.store.read() as reader:
            records = {s: len(reader.get("chunks", key_of(s))) for s in self.expected.chunks}
        return {s: m.num_bytes + records[s] for s, m in self._manifests().items()}

    def _now(self) -> int:
        self.moment += 1
        return self.moment

    def _uses_are_written(self) -> None:
        """The recorded time is that of the use, possibly before the chunk was last put."""
        for seed, moment in self.touched.items():
            if seed in self._with_kv():
                self.uses[seed] = max(moment, self.uses[seed])
        self.touched.clear()

    def _by_last_use(self) -> list[int]:
        """Seeds, those unused for longest first."""
        return sorted(self.uses, key=self.uses.__getitem__)

    def _expect(self, step: Operation) -> None:
        self.expected = step.expect(self.expected)
        evicted = step.seeds if step.kind == "evict" else ()
        self.uses = {s: m for s, m in self.uses.items() if s in self.expected.chunks and s not in evicted}

    def _free(self, gone: Iterable[int]) -> None:
        """What the quota has no room for: the KV of a document's chunk, other chunks whole."""
        owned = {s for seeds in self.expected.documents.values() for s in seeds}
        self._expect(Operation("evict", tuple(s for s in gone if s in owned)))
        self._expect(Operation("remove", tuple(s for s in gone if s not in owned)))

    def _document_bytes(self) -> int:
        with self.store.read() as reader:
            return sum(len(reader.get("documents", key)) for key in reader.keys_from(b"", "documents"))

    def _evicted(
        self, new: dict[int, int], keep: tuple[int, ...] = (), sizes: dict[int, int] | None = None
    ) -> list[int] | None:
        """Seeds that must be freed for `new` (seed -> bytes) to come; None when even that is not enough."""
        if not self.quota:
            return []
        sizes = self._sizes() if sizes is None else sizes
        owned = {s for seeds in self.expected.documents.values() for s in seeds}
        after, gone = sum((sizes | new).values()) + self._document_bytes(), []
        for seed in (s for s in self._by_last_use() if s not in new and s not in keep):
            if after <= self.quota:
                break
            after -= sizes[seed]
            if seed in owned:
                with_kv = with_digests(*make_chunk(seed, self.expected.chunks[seed]))
                after += len(encode_manifest(with_kv.without_kv())) if seed in self._with_kv() else sizes[seed]
            gone.append(seed)
        return gone if after <= self.quota else None


@pytest.mark.parametrize("examples", [12, pytest.param(1000, marks=pytest.mark.torture)])
def test_any_sequence_of_calls_is_that_of_a_dict(examples: int, ledger: Ledger) -> None:
    StoreMachine.steps = 0
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    ledger.add("stateful test against a dict", examples=examples, steps=StoreMachine.steps, differences=0)
