"""Stores to export, and exports taken apart and put together again."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import torch
from bare_store import bare_writing
from cacheblend_store import (
    ChunkManifest,
    ChunkStore,
    DocumentChunk,
    DocumentRecord,
    KeyParts,
    chunk_key,
    collection_id,
)
from cacheblend_store.format.codecs import encode_kv
from cacheblend_store.format.keys import blob_key

LAYERS, HEADS, DIM, PREFIX = 3, 2, 8, (7, 8)


def make_chunk(
    seed: int, codec: str = "float32", salt: str = "", context: str = "sink"
) -> tuple[ChunkManifest, list[bytes]]:
    """A chunk whose id is the digest of what it is made of. context "prefix": that of its collection."""
    generator = torch.Generator().manual_seed(seed)
    ids = PREFIX if context == "prefix" else tuple(torch.randint(0, 1000, (5,), generator=generator).tolist())
    parts = KeyParts("model", "tokenizer", PREFIX, (), codec, salt)
    before = () if context == "prefix" else PREFIX
    blobs = [encode_kv(*torch.randn(2, len(ids), HEADS, DIM, generator=generator), codec) for _ in range(LAYERS)]
    manifest = ChunkManifest(
        key=chunk_key(replace(parts, prefix_ids=before), ids), token_ids=ids, text=f"chunk {seed} \ud800 ü", model="model",
        model_name="m", tokenizer="tokenizer", collection=collection_id(parts), context=context, left_context_ids=(),
        collected_len=len(before) + len(ids), codec=codec, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM,
        source=f"{seed}.md", index=0, span=(0, 4), created=1.5,
    )  # fmt: skip
    return manifest, blobs


def fill(path: Path, count: int = 4, codec: str = "float32", salt: str = "") -> ChunkStore:
    """A store of a prefix, chunks, and a document that has all but the last of them."""
    store = ChunkStore.open(path, mode="write")
    manifests = []
    for seed in range(count):
        manifest, blobs = make_chunk(seed, codec, salt)
        store.put_chunk(manifest, blobs)
        manifests.append(manifest)
    store.put_chunk(*make_chunk(99, codec, salt, "prefix"))
    places = tuple(DocumentChunk(m.key, i, 0, 4) for i, m in enumerate(manifests[:-1]))
    store.put_documents([DocumentRecord("a.md", manifests[0].collection, "d", places, 2.5, {"chunk_tokens": 5})])
    return store


def content(store: ChunkStore) -> tuple[object, ...]:
    chunks = []
    for manifest in store.chunks(prefixes=True):
        with store.read() as reader:
            chunks.append((manifest, [bytes(reader.blob(manifest, i)) for i in range(LAYERS)]))
    return chunks, store.documents()


def damage(store: ChunkStore, manifest: ChunkManifest) -> None:
    """Flip a bit of one blob behind the back of its digest."""
    name = blob_key(manifest.key, 1)
    with bare_writing(store) as (txn, dbs):
        blob = bytearray(txn.get(name, db=dbs["blobs"]))
        blob[-9] ^= 1
        txn.put(name, bytes(blob), db=dbs["blobs"])


def files_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
