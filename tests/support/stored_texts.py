"""Documents with one chunk per paragraph, stored without a model, for tests of search."""

from __future__ import annotations

import time

from cacheblend_store import ChunkManifest, ChunkStore, DocumentChunk, DocumentRecord, KeyParts, chunk_key
from cacheblend_store.format.records import document_key

SHAPE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1}


def put_document(store: ChunkStore, source: str, *paragraphs: str, collection: str = "one") -> list[str]:
    """Store a document with one chunk per paragraph. Return the ids."""
    parts = KeyParts("model", "tokenizer", (), (), "float32", collection)
    places = []
    for index, text in enumerate(paragraphs):
        ids = tuple(text.encode())
        key = chunk_key(parts, ids)
        manifest = ChunkManifest(
            key=key, token_ids=ids, text=text, model="model", model_name="tiny", tokenizer="tokenizer", collection=collection,
            context="sink", left_context_ids=(), collected_len=len(ids), codec="float32", source=source, index=index,
            span=(0, len(text)), created=time.time(), **SHAPE,
        )  # fmt: skip
        store.put_chunk(manifest, [b"kv" * len(ids)])
        places.append(DocumentChunk(key, index, 0, len(text)))
    store.put_documents([DocumentRecord(source, collection, "digest", tuple(places), time.time())])
    return [place.key.hex() for place in places]


def forget(store: ChunkStore, collection: str, source: str, context: str = "sink") -> list[bytes]:
    """Remove a document's record and the chunks that only it has. Return their keys."""
    return store.put_documents((), [document_key(collection, source, context)])
