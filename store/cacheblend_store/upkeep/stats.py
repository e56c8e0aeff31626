"""Statistics of a store."""

from __future__ import annotations

from dataclasses import dataclass, field

from cacheblend_store.lmdb_file.directory import DATA
from cacheblend_store.store import ChunkStore


@dataclass
class Amount:
    """Size of a set of chunks."""

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0  # of their blobs
    kv_tokens: int = 0  # tokens of the chunks with blobs

    @property
    def bytes_per_token(self) -> int:
        """Bytes that are stored for a token with KV."""
        return round(self.bytes / max(self.kv_tokens, 1))

    def add(self, num_tokens: int, num_bytes: int) -> None:
        self.chunks += 1
        self.tokens += num_tokens
        self.bytes += num_bytes
        self.kv_tokens += num_tokens if num_bytes else 0


@dataclass
class StoreStats:
    """Statistics of a store. Sizes are in bytes."""

    chunks: int
    documents: int
    live_bytes: int  # all blobs
    text_bytes: int  # all chunk records
    document_bytes: int  # all document records
    used_bytes: int  # pages of blobs and chunk records
    max_bytes: int  # quota for quota_bytes, 0: no quota
    file_bytes: int
    free_bytes: int  # reusable pages in the file
    damaged: int = 0  # records that cannot be decoded
    without_kv: int = 0  # chunks that currently have no KV, without prefixes
    # (model name, fingerprint, codec) -> its chunks, without the prefixes of prompts
    models: dict[tuple[str, str, str], Amount] = field(default_factory=dict)
    prefixes: Amount = field(default_factory=Amount)

    @property
    def quota_bytes(self) -> int:
        """Bytes that count against the quota."""
        return self.live_bytes + self.text_bytes + self.document_bytes

    def totals(self) -> dict[str, int]:
        """Return the plain numbers. Chunks do not include prefixes."""
        numbers = {k: v for k, v in vars(self).items() if isinstance(v, int) and k not in ("damaged", "without_kv")}
        return numbers | {"chunks": self.chunks - self.prefixes.chunks}


def stats(store: ChunkStore) -> StoreStats:
    """Return the statistics of one snapshot. Reads every manifest."""
    with store.read() as reader:
        state = reader.state()
        found = StoreStats(
            chunks=reader.entries("chunks"),
            documents=reader.entries("documents"),
            live_bytes=state.live_bytes,
            text_bytes=state.text_bytes or 0,
            document_bytes=state.document_bytes or 0,
            used_bytes=reader.pages.used_bytes("chunks") + reader.pages.used_bytes("blobs"),
            max_bytes=state.max_bytes,
            file_bytes=(store.path / DATA).stat().st_size,
            free_bytes=reader.pages.free_bytes,
        )
        for manifest in reader.manifests():
            found.without_kv += not manifest.has_kv and manifest.context != "prefix"
            who = (manifest.model_name, manifest.model, manifest.codec)
            amount = found.prefixes if manifest.context == "prefix" else found.models.setdefault(who, Amount())
            amount.add(manifest.num_tokens, manifest.num_bytes)
        found.damaged = found.chunks - sum(amount.chunks for amount in (found.prefixes, *found.models.values()))
    return found
