"""What is in a store, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cacheblend_store.errors import BadBlob
from cacheblend_store.format.records import ChunkManifest
from cacheblend_store.lmdb_file.filesystem import DATA, DATABASES
from cacheblend_store.lmdb_file.pages import PageReader
from cacheblend_store.reader import StoreReader


@dataclass
class Share:
    """What one model or one document has of a store. bytes: of blobs."""

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, manifest: ChunkManifest) -> None:
        self.chunks += 1
        self.tokens += manifest.num_tokens
        self.bytes += manifest.num_bytes


@dataclass
class StoreStats:
    """live_bytes: blobs. used_bytes: blobs and manifests in whole pages. free_bytes: pages of the file to be used again.

    damaged, without_kv: records that do not read, and those of chunks that have no KV now. models: by (model name,
    fingerprint, codec). All three empty unless a breakdown was asked for.
    """

    chunks: int
    documents: int
    live_bytes: int
    used_bytes: int
    max_bytes: int
    file_bytes: int
    free_bytes: int
    damaged: int = 0
    without_kv: int = 0
    models: dict[tuple[str, str, str], Share] = field(default_factory=dict)

    def totals(self) -> dict[str, int]:
        """The numbers that need no breakdown."""
        return {k: v for k, v in vars(self).items() if isinstance(v, int) and k not in ("damaged", "without_kv")}


def collect_stats(path: Path, reader: StoreReader, *, breakdown: bool = False) -> StoreStats:
    """The numbers of one snapshot."""
    state, page_size = reader.state(), reader.pages.meta.page_size
    file_bytes = (path / DATA).stat().st_size
    stats = StoreStats(
        chunks=reader.entries("chunks"),
        documents=reader.entries("documents"),
        live_bytes=state.live_bytes,
        used_bytes=state.used_bytes,
        max_bytes=state.max_bytes,
        file_bytes=file_bytes,
        free_bytes=max(0, reader.pages.meta.next_pgno - used_pages(reader.pages)) * page_size,
    )
    if breakdown:
        _break_down(reader, stats)
    return stats


def used_pages(pages: PageReader) -> int:
    """Pages that some tree of the snapshot holds, by LMDB's own counters."""
    trees = [pages.meta.main, pages.meta.free]
    for name in DATABASES:
        tree = pages.tree(name.encode())
        if tree is not None:
            trees.append(tree)
    return 2 + sum(tree.num_pages for tree in trees)


def _break_down(reader: StoreReader, stats: StoreStats) -> None:
    for key in reader.keys_from(b""):
        try:
            manifest = reader.manifest(key)
        except BadBlob:
            stats.damaged += 1
            continue
        if manifest is not None:
            stats.without_kv += not manifest.has_kv
            who = (manifest.model_name, manifest.model, manifest.codec)
            stats.models.setdefault(who, Share()).add(manifest)
