"""Statistics of a store."""

from __future__ import annotations

from dataclasses import dataclass, field

from cacheblend_store.lmdb_file.directory import DATA
from cacheblend_store.state import count_bytes
from cacheblend_store.store import ChunkStore


@dataclass
class Amount:
    """A number of chunks, their tokens, and the bytes of their blobs."""

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, tokens: int, num_bytes: int) -> None:
        """Add one chunk."""
        self.chunks += 1
        self.tokens += tokens
        self.bytes += num_bytes


@dataclass
class StoreStats:
    """Sizes are in bytes. live_bytes: all blobs. text_bytes: all chunk records. max_bytes: the quota for the two, 0 =
    none. used_bytes: the pages of both. free_bytes: pages of the file that can be used again.

    damaged, without_kv: records that do not read, and those of chunks, but of no prefix, that have no KV now. models:
    by (model name, fingerprint, codec), their chunks without prompts' prefixes, which are apart.
    """

    chunks: int
    documents: int
    live_bytes: int
    text_bytes: int
    used_bytes: int
    max_bytes: int
    file_bytes: int
    free_bytes: int
    damaged: int = 0
    without_kv: int = 0
    models: dict[tuple[str, str, str], Amount] = field(default_factory=dict)
    prefixes: Amount = field(default_factory=Amount)

    def totals(self) -> dict[str, int]:
        """Return the plain numbers; chunks without the prefixes."""
        numbers = {k: v for k, v in vars(self).items() if isinstance(v, int) and k not in ("damaged", "without_kv")}
        return numbers | {"chunks": self.chunks - self.prefixes.chunks}


def stats(store: ChunkStore) -> StoreStats:
    """Return the statistics of one snapshot. Reads every manifest."""
    with store.read() as reader:
        state, num_read = reader.state(), 0
        found = StoreStats(
            chunks=reader.entries("chunks"),
            documents=reader.entries("documents"),
            live_bytes=state.live_bytes,
            text_bytes=count_bytes(reader.pages, "chunks") if state.text_bytes is None else state.text_bytes,
            used_bytes=reader.pages.used_bytes("chunks") + reader.pages.used_bytes("blobs"),
            max_bytes=state.max_bytes,
            file_bytes=(store.path / DATA).stat().st_size,
            free_bytes=reader.pages.free_bytes,
        )
        for manifest in reader.manifests():
            num_read += 1
            found.without_kv += not manifest.has_kv and manifest.context != "prefix"
            who = (manifest.model_name, manifest.model, manifest.codec)
            amount = found.prefixes if manifest.context == "prefix" else found.models.setdefault(who, Amount())
            amount.add(manifest.num_tokens, manifest.num_bytes)
        found.damaged = found.chunks - num_read
    return found
