"""A store reader over one blob with arbitrary content and a valid digest, to test layout checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO

from cacheblend_store import ChunkManifest, StoreReader
from cacheblend_store.lmdb_file.pages.layout import Node
from cacheblend_store.writer import with_digests
from small_chunks import make_chunk


class OneBlob:
    """Replaces the pages of a store."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def get(self, database: str, key: bytes) -> Node:
        return Node(key, len(self._blob), self._blob, 0, 0)

    def read_into(self, node: Node, buffers: Sequence[memoryview]) -> None:
        rest = BytesIO(node.inline)
        for buffer in buffers:
            rest.readinto(buffer)


def read_layer(blob: bytes, manifest: ChunkManifest, layer: int = 0) -> dict[str, memoryview]:
    """Read the layer of a chunk whose blob this is."""
    return StoreReader(OneBlob(blob)).layer(manifest, layer)  # type: ignore[arg-type]


def read_blob(blob: bytes, codec: str, num_tokens: int, num_kv_heads: int, head_dim: int) -> dict[str, memoryview]:
    """Return what a reader finds in the blob, given the manifest of a chunk of this shape."""
    manifest = replace(
        make_chunk(1)[0], token_ids=tuple(range(num_tokens)), codec=codec, num_layers=1, num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )  # fmt: skip
    return read_layer(blob, with_digests(manifest, [blob]))
