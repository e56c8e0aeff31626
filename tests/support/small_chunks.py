"""Chunks whose every byte follows from two numbers, and a model of what a store of them must hold.

No torch: writers that are killed by the thousand import this. A chunk is (seed, version): the seed makes its token ids
and so its key, the version its KV. Whatever is read back says which it claims to be, and is compared with what that is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from cacheblend_store import (
    ChunkManifest,
    ChunkStore,
    DocumentChunk,
    DocumentRecord,
    DocumentSummary,
    KeyParts,
    StoreReader,
    chunk_key,
    collection_id,
)
from cacheblend_store.format.blobs import blob_spec, encode_blob, state_spec
from cacheblend_store.format.keys import pack_ids
from stored_texts import forget

PARTS = KeyParts("model", "tokenizer", (1, 2), (), "float32")
COLLECTION = collection_id(PARTS)
LAYERS, HEADS, DIM = 2, 1, 4
NUM_TOKENS = (3, 60, 300)  # in a leaf, one overflow page, several
STATE = (("F32", (1, 2, 8)), ("BF16", (1, 40)))  # of every seventh chunk


@lru_cache(4096)
def token_ids(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (seed, *(rng.randrange(50_000) for _ in range(NUM_TOKENS[seed % len(NUM_TOKENS)] - 1)))


@lru_cache(4096)
def key_of(seed: int) -> bytes:
    return chunk_key(PARTS, token_ids(seed))


@lru_cache(4096)
def make_chunk(seed: int, version: int = 0) -> tuple[ChunkManifest, tuple[bytes, ...]]:
    ids = token_ids(seed)
    rng = random.Random(f"{seed} {version}")
    spec = blob_spec("float32", len(ids), HEADS, DIM)
    blobs = tuple(
        encode_blob(spec, {name: rng.randbytes(tensor.num_bytes) for name, tensor in spec.items()})
        for _ in range(LAYERS)
    )
    state = STATE if seed % 7 == 6 else ()
    if state:
        tensors = state_spec(state)
        blobs += (encode_blob(tensors, {name: rng.randbytes(t.num_bytes) for name, t in tensors.items()}),)
    manifest = ChunkManifest(
        key=key_of(seed), token_ids=ids, text=f"{seed} {version}", model="model", model_name="m", tokenizer="tokenizer",
        collection=COLLECTION, context="sink", left_context_ids=(), collected_len=len(ids) + 2, codec="float32",
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, source=f"{seed}.md", index=0, span=(0, 4), created=1.0,
        state=state,
    )  # fmt: skip
    return manifest, blobs


def summary_of(source: str, seeds: tuple[int, ...]) -> DocumentSummary:
    """The summary of a document of these chunks."""
    keys, tokens = b"".join(map(key_of, seeds)), pack_ids([len(token_ids(seed)) for seed in seeds])
    return DocumentSummary(source, COLLECTION, "sink", "digest", {}, keys, tokens, file={"inode": 1})


class WrongData(AssertionError):
    """The store gave something that was never put there."""


def read_chunk(reader: StoreReader, manifest: ChunkManifest) -> tuple[int, int]:
    """(seed, version) of a stored chunk, every layer read and compared. Raises what the store does, or WrongData.

    Of a chunk without KV only the record is compared.
    """
    layers = range(manifest.num_blobs if manifest.has_kv else 0)
    views = [reader.layer(manifest, layer) for layer in layers]
    seed, version = map(int, manifest.text.split())
    wanted, blobs = make_chunk(seed, version)
    same = (manifest.key, manifest.token_ids) == (wanted.key, wanted.token_ids) and manifest.num_layers == LAYERS
    if not same or any(b"".join(view.values()) not in blobs[layer] for layer, view in enumerate(views)):
        raise WrongData(f"chunk {manifest.id[:12]} is not {manifest.text}")
    return seed, version


@dataclass
class Contents:
    """Expected contents of a store."""

    chunks: dict[int, int] = field(default_factory=dict)  # seed -> version
    documents: dict[str, tuple[int, ...]] = field(default_factory=dict)  # source -> seeds
    without_kv: set[int] = field(default_factory=set)  # seeds of chunks without KV

    def copy(self) -> Contents:
        return Contents(dict(self.chunks), dict(self.documents), set(self.without_kv))

    def remove(self, seed: int) -> None:
        self.chunks.pop(seed, None)
        self.without_kv.discard(seed)

    def drop_orphans(self, seeds: tuple[int, ...]) -> None:
        referred = {seed for owned in self.documents.values() for seed in owned}
        for seed in seeds:
            if seed not in referred:
                self.remove(seed)


@dataclass(frozen=True)
class Operation:
    """kind: put (chunks in one transaction), records (of chunks, without KV), evict, remove, document (replace its
    record), forget (a document), summary (of a document, kept where all its chunks have KV)."""

    kind: str
    seeds: tuple[int, ...] = ()
    version: int = 0
    source: str = ""

    def expect(self, contents: Contents) -> Contents:
        """Return the expected contents of a store after this operation."""
        after = contents.copy()
        if self.kind == "put":
            after.chunks |= dict.fromkeys(self.seeds, self.version)
            after.without_kv -= set(self.seeds)
        elif self.kind == "records":
            after.without_kv |= set(self.seeds) - after.chunks.keys()
            after.chunks = dict.fromkeys(self.seeds, self.version) | after.chunks
        elif self.kind == "evict":
            after.without_kv |= set(self.seeds) & after.chunks.keys()
        elif self.kind == "remove":
            for seed in self.seeds:
                after.remove(seed)
        elif self.kind != "summary":
            old = after.documents.pop(self.source, ())
            if self.kind == "document":
                after.documents[self.source] = self.seeds
            after.drop_orphans(old)
        return after

    def perform(self, store: ChunkStore) -> None:
        if self.kind == "put":
            store.put_chunks([make_chunk(seed, self.version) for seed in self.seeds])
        elif self.kind == "records":
            store.put_records(make_chunk(seed, self.version)[0] for seed in self.seeds)
        elif self.kind == "evict":
            store.evict_chunks(key_of(seed) for seed in self.seeds)
        elif self.kind == "remove":
            store.remove_chunks([key_of(seed) for seed in self.seeds])
        elif self.kind == "document":
            chunks = tuple(DocumentChunk(key_of(seed), i, i, i + 1) for i, seed in enumerate(self.seeds))
            store.put_documents([DocumentRecord(self.source, COLLECTION, "digest", chunks, 1.0)])
        elif self.kind == "summary":
            seeds = read_contents(store).documents.get(self.source, ())
            store.put_summaries([summary_of(self.source, seeds)])
        elif self.kind == "forget":
            forget(store, COLLECTION, self.source)
        else:
            raise ValueError(self.kind)


def operation(writer: int, number: int, num_seeds: int = 10) -> Operation:
    """The number-th operation of a writer, on seeds and sources of its own; mostly puts of KV."""
    rng = random.Random(f"{writer} {number}")
    seeds = tuple(writer * 1000 + s for s in rng.sample(range(num_seeds), rng.choice((1, 1, 2, 4))))
    kinds = {"put": 6, "records": 1, "evict": 2, "remove": 2, "document": 2, "forget": 1, "summary": 2}
    kind = rng.choices(tuple(kinds), tuple(kinds.values()))[0]
    return Operation(kind, seeds, number, f"{writer}/{rng.randrange(2)}.md")


def read_contents(store: ChunkStore, writer: int | None = None) -> Contents:
    """What the store holds (of one writer), every byte of it read and compared."""
    found = Contents()
    with store.read() as reader:
        for key in reader.keys_from(b""):
            manifest = reader.manifest(key)
            assert manifest is not None
            if writer is None or manifest.token_ids[0] // 1000 == writer:
                seed, version = read_chunk(reader, manifest)
                found.chunks[seed] = version
                if not manifest.has_kv:
                    found.without_kv.add(seed)
        seeds = {key_of(seed): seed for seed in _known_seeds(reader)}
        for record in reader.documents():
            if writer is None or record.source.startswith(f"{writer}/"):
                found.documents[record.source] = tuple(seeds.get(c.key, -1) for c in record.chunks)
    return found


def _known_seeds(reader: StoreReader) -> Iterator[int]:
    """Seeds that documents may name: of every writer with a document."""
    for writer in {record.source.split("/")[0] for record in reader.documents()}:
        yield from range(int(writer) * 1000, int(writer) * 1000 + 100)
