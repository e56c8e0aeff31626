"""Wrong KV with valid digests."""

from __future__ import annotations

from pathlib import Path

from cacheblend_store import ChunkStore
from cacheblend_store.format.codecs import encode_kv
from decoded import read_kv


def forge(path: Path, key: str) -> None:
    """Give a chunk another token's V in one layer, with valid digests, so that no audit of digests can find it."""
    with ChunkStore.open(path, mode="write") as store:
        manifest = store.get_chunk(bytes.fromhex(key))
        assert manifest is not None
        blobs = []
        with store.read() as reader:
            for layer in range(manifest.num_layers):
                k, v = read_kv(reader, manifest, layer)
                if layer == 2:
                    v[3] = v[9]
                blobs.append(encode_kv(k, v, manifest.codec))
        assert store.put_chunk(manifest, blobs) == "replaced"
