"""Chunks of random KV in any codec."""

from __future__ import annotations

from dataclasses import replace

import torch
from cacheblend_store import ChunkManifest, KeyParts, chunk_key, collection_id
from cacheblend_store.format.codecs import encode_kv

PARTS = KeyParts("model", "tokenizer", (1, 2), (), "float32")
LAYERS, HEADS, DIM = 3, 2, 8


def make_chunk(seed: int, num_tokens: int = 5, codec: str = "float32") -> tuple[ChunkManifest, list[bytes]]:
    generator = torch.Generator().manual_seed(seed)
    parts = replace(PARTS, codec=codec)
    ids = tuple(torch.randint(0, 1000, (num_tokens,), generator=generator).tolist())
    blobs = []
    for _ in range(LAYERS):
        k, v = torch.randn(2, num_tokens, HEADS, DIM, generator=generator)
        blobs.append(encode_kv(k, v, codec))
    manifest = ChunkManifest(
        key=chunk_key(parts, ids), token_ids=ids, text=f"chunk {seed}", model="model", model_name="m", tokenizer="tokenizer",
        collection=collection_id(parts), context="sink", left_context_ids=(), collected_len=7, codec=codec,
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, source=f"{seed}.md", index=0, span=(0, 4), created=1.0,
    )  # fmt: skip
    return manifest, blobs
