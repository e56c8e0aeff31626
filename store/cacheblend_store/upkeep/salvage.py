"""Salvage: what still reads of a store with damaged pages, copied into a new file that takes the old one's place.

Nothing is believed for being there: a manifest counts when its digest matches, a chunk when all its blobs match the
digests in its manifest. Keys are digests of content, so even a blob found outside of any tree is the right one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend_store.errors import StoreCorrupt, StoreError, StoreLocked
from cacheblend_store.format.keys import KEY_BYTES, blob_key
from cacheblend_store.format.records import ChunkManifest, blob_digest, decode_document, decode_manifest, document_key
from cacheblend_store.lmdb_file import locks
from cacheblend_store.lmdb_file.datafile import (
    MAKING,
    MAP_SIZE,
    clear_making,
    fresh_folder,
    open_lmdb,
    put_in_place,
)
from cacheblend_store.lmdb_file.environment import open_environment
from cacheblend_store.lmdb_file.filesystem import DATA, DATABASES, again_hint, check_space, system_errors
from cacheblend_store.lmdb_file.pages import NO_PAGE, PAGE_SIZES, Branch, Leaf, Node, PageReader, Tree, parse_meta
from cacheblend_store.lmdb_file.translation import translated
from cacheblend_store.progress import Progress
from cacheblend_store.state import read_identity, read_state, recount, state_value, write_identity, write_state

_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class SalvageReport:
    """What was kept, and how many manifests were found whose chunk was not whole."""

    chunks: int
    documents: int
    lost: int


def salvage(path: Path, lock_timeout: float, progress: Progress | None = None) -> SalvageReport:
    """Rebuild the store at `path`. Needs room for a copy, and no other process that has it open. Where a page of an index
    does not read, the whole file is looked through, and what was removed lately may come back.

    Raises StoreCorrupt when nothing says what the file is, StoreLocked, StoreNoSpace.
    """
    data = path / DATA
    with system_errors(path):
        there = data.exists()
    if not there:
        raise StoreCorrupt(f"the store at {path} has lost its data.mdb", again_hint(path))
    reports: list[SalvageReport] = []
    with locks.writer_lock(path, lock_timeout):
        clear_making(path)
        check_space(path, data.stat().st_size)
        environment = open_environment(path)
        if environment is not None:
            environment.replace_file(lambda folder: reports.append(_copy(data, folder, progress)))
        else:
            _replace_unopened(path, lock_timeout, lambda folder: reports.append(_copy(data, folder, progress)))
    return reports[0]


def _replace_unopened(path: Path, timeout: float, make: Callable[[Path], None]) -> None:
    refused = StoreLocked(f"the store at {path} is open in other processes", "end them, then try again")
    share = locks.share(path, timeout, create=True)
    if share is None:
        raise refused
    try:
        if not locks.make_exclusive(share, timeout):
            raise refused
        make(fresh_folder(path / MAKING))
        put_in_place(path / MAKING, path)
    finally:
        clear_making(path)
        os.close(share)


def _copy(data: Path, folder: Path, progress: Progress | None) -> SalvageReport:
    handle = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        source = _Source(handle, data)
        with translated(data.parent):
            target = open_lmdb(folder, MAP_SIZE)
            dbs = {name: target.open_db(name.encode()) for name in DATABASES}
            report = _Copier(source, target, dbs).run(progress)
            target.close()
        return report
    finally:
        os.close(handle)


class _Source:
    """The damaged file: the newest meta page that reads, and walks that step over what does not."""

    def __init__(self, handle: int, data: Path) -> None:
        self._data = data
        metas = []
        for offset in (0, *PAGE_SIZES):
            meta = parse_meta(os.pread(handle, 4096, offset))
            if meta is not None:
                metas.append(meta)
        sizes = [m.page_size for m in metas if m.page_size in PAGE_SIZES]
        if not metas:
            raise StoreCorrupt(
                f"{data} has no meta page that reads: nothing can be rescued",
                again_hint(data.parent),
            )
        page_size = sizes[0] if sizes else 4096
        pages = os.fstat(handle).st_size // page_size
        readers = []
        for meta in metas:
            sane = meta._replace(page_size=page_size, next_pgno=pages)
            sane = sane._replace(free=meta.free._replace(flags=8), main=meta.main._replace(flags=0))
            readers.append(PageReader(handle, sane, str(data.parent)))
        self.pages = max(readers, key=_age)
        self.trees: dict[str, Tree] = {}
        for name in DATABASES:
            with suppress(StoreError):
                tree = self.pages.tree(name.encode())
                if tree is not None:
                    self.trees[name] = tree

    def nodes(self, name: str, key_sizes: tuple[int, ...]) -> Iterator[Node]:
        """Nodes of a database whose extents read: those of its tree, then, when the tree is lost or a page of it does not
        read, those of any other leaf in the file. What a bad branch led to is there, and often an older copy of a bad leaf.
        """
        tree = self.trees.get(name)
        for node in self._walk(tree) if tree is not None else self._scan(set()):
            try:
                if len(node.key) in key_sizes:
                    self.pages.check_extent(node)
                    yield node
            except StoreError:
                continue

    def _walk(self, tree: Tree) -> Iterator[Node]:
        todo, seen, whole = ([] if tree.root == NO_PAGE else [tree.root]), set[int](), True
        while todo:
            pgno = todo.pop()
            if pgno in seen:
                continue
            seen.add(pgno)
            try:
                page = self.pages.page_at(pgno, tree)
            except StoreError:
                whole = False
                continue
            if isinstance(page, Branch):
                todo += reversed(page.children)
            else:
                yield from page.nodes
        if not whole:
            yield from self._scan(seen)

    def _scan(self, seen: set[int]) -> Iterator[Node]:
        """Nodes of every leaf in the file, but for the pages in `seen`."""
        for pgno in range(2, self.pages.meta.next_pgno):
            if pgno in seen:
                continue
            try:
                page = self.pages.page_at(pgno, _NO_TREE)
            except StoreError:
                continue
            if isinstance(page, Leaf):
                yield from page.nodes

    def get(self, key: bytes) -> bytes | None:
        """A record of the database `meta`."""
        for node in self.nodes("meta", (len(key),)):
            if node.key == key:
                return self.pages.value(node)
        return None


def _age(pages: PageReader) -> tuple[int, int]:
    """Which commit a meta page is of, by what that commit freed where it reads."""
    try:
        return pages.last_freed(), pages.meta.txnid
    except StoreError:
        return 0, pages.meta.txnid


_NO_TREE = Tree(0, 1, 0, 0, 0)


class _Copier:
    """Copies what is whole. Blobs are looked up by key in the order they are needed."""

    def __init__(self, source: _Source, target: Any, dbs: dict[str, Any]) -> None:
        self._source, self._target, self._dbs = source, target, dbs
        self._blobs: dict[bytes, list[Node]] = {}

    def run(self, progress: Progress | None) -> SalvageReport:
        for node in self._source.nodes("blobs", (KEY_BYTES + 4,)):
            self._blobs.setdefault(node.key, []).append(node)
        manifests = self._manifests()
        kept, lost, size = set(), 0, 0
        transaction = self._target.begin(write=True)
        for done, (key, (manifest, value)) in enumerate(sorted(manifests.items())):
            blobs = self._whole(manifest)
            if blobs is None:
                lost += 1
                continue
            for layer, blob in enumerate(blobs):
                transaction.put(blob_key(key, layer), blob, db=self._dbs["blobs"])
            transaction.put(key, value, db=self._dbs["chunks"])
            kept.add(key)
            size += manifest.num_bytes
            if size >= _BATCH_BYTES:
                transaction.commit()
                transaction, size = self._target.begin(write=True), 0
            if progress is not None:
                progress(done + 1, len(manifests))
        documents = self._copy_documents(transaction)
        for node in self._source.nodes("lru", (KEY_BYTES,)):
            if node.key in kept and node.size == 16 and node.inline:
                transaction.put(node.key, node.inline, overwrite=False, db=self._dbs["lru"])
        self._copy_meta(transaction)
        transaction.commit()
        self._count()
        return SalvageReport(len(kept), documents, lost)

    def _manifests(self) -> dict[bytes, tuple[ChunkManifest, bytes]]:
        found: dict[bytes, tuple[ChunkManifest, bytes]] = {}
        for node in self._source.nodes("chunks", (KEY_BYTES,)):
            try:
                value = self._source.pages.value(node)
                manifest = decode_manifest(node.key, value)
            except StoreError:
                continue
            if node.key not in found or found[node.key][0].created < manifest.created:
                found[node.key] = (manifest, value)
        return found

    def _whole(self, manifest: ChunkManifest) -> list[bytes] | None:
        blobs: list[bytes] = []
        for layer, digest in enumerate(manifest.blob_digests if manifest.has_kv else ()):
            for node in self._blobs.get(blob_key(manifest.key, layer), ()):
                try:
                    blob = self._source.pages.value(node)
                except StoreError:
                    continue
                if blob_digest(manifest.key, layer, manifest.num_tokens, blob) == digest:
                    blobs.append(blob)
                    break
            else:
                return None
        return blobs

    def _copy_documents(self, transaction: Any) -> int:
        found: dict[bytes, tuple[float, bytes, list[bytes]]] = {}
        for node in self._source.nodes("documents", (16,)):
            try:
                value = self._source.pages.value(node)
                record = decode_document(node.key, value)
            except StoreError:
                continue
            keys = [chunk.key for chunk in record.chunks]
            newer = node.key not in found or found[node.key][0] < record.updated
            if newer and document_key(record.collection, record.source, record.context) == node.key:
                found[node.key] = (record.updated, value, keys)
        for name, (_, value, keys) in found.items():
            transaction.put(name, value, db=self._dbs["documents"])
            for key in keys:
                transaction.put(key + name, b"", db=self._dbs["refs"])
        return len(found)

    def _copy_meta(self, transaction: Any) -> None:
        write_identity(transaction, self._dbs)
        try:
            read_identity(self._source.get, str(self._source._data.parent))
        except StoreError:
            return  # a new identity: what is derived from the old one is made anew
        identity = self._source.get(b"identity")
        transaction.put(b"identity", identity, db=self._dbs["meta"])

    def _count(self) -> None:
        """Write the counters, which are those of the new file; the quota is kept when it reads."""
        try:
            quota = read_state(state_value(self._source.get), self._source.pages).max_bytes
        except StoreError:
            quota = 0
        with self._target.begin(write=True) as transaction:
            path = Path(self._target.path()) / DATA
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                metas = [parse_meta(os.pread(handle, 4096, offset)) for offset in (0, 4096, os.sysconf("SC_PAGE_SIZE"))]
                newest = max((m for m in metas if m is not None), key=lambda m: m.txnid)
                state = recount(PageReader(handle, newest, str(path.parent)))
            finally:
                os.close(handle)
            write_state(transaction, self._dbs, replace(state, max_bytes=quota))
