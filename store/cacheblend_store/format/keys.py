"""Chunk keys: cryptographic digests of everything that determines the KV."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cacheblend_store.format.levels import BITS

FORMAT_VERSION = 2
CODEC_VERSION = 2  # version of the few-bit codecs
KEY_BYTES = 20  # blake2b-160


@dataclass(frozen=True)
class KeyParts:
    """Parts of a chunk key other than the chunk's tokens."""

    model: str  # fingerprint of architecture, weights, RoPE and dtype
    tokenizer: str  # fingerprint
    prefix_ids: Sequence[int]  # tokens before every chunk
    left_context_ids: Sequence[int]  # tokens between the prefix and this chunk when it was collected
    codec: str
    salt: str = ""  # separates tenants


def chunk_key(parts: KeyParts, token_ids: Sequence[int]) -> bytes:
    """Return the blake2b-160 digest of format version, parts and token ids, each preceded by its length."""
    digest = _digest_of(b"chunk", parts)
    for ids in (parts.left_context_ids, token_ids):
        _add(digest, pack_ids(ids))
    return digest.digest()


def blob_key(key: bytes, layer: int) -> bytes:
    """Return the key of a layer's blob. The blobs of a chunk are adjacent and ordered by layer."""
    return key + layer.to_bytes(4, "big")


def collection_id(parts: KeyParts) -> str:
    """Return the hex digest of the parts without the left context. Chunks that can share a prompt have the same id."""
    return _digest_of(b"collection", parts).hexdigest()


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def _digest_of(kind: bytes, parts: KeyParts) -> hashlib.blake2b:
    ids = tuple(parts.prefix_ids)
    codec = f"{parts.codec}.{CODEC_VERSION}" if parts.codec in BITS else parts.codec
    return _digest(kind, parts.model, parts.tokenizer, ids, codec, parts.salt).copy()


@lru_cache(64)  # shared by millions of chunks
def _digest(
    kind: bytes, model: str, tokenizer: str, prefix_ids: tuple[int, ...], codec: str, salt: str
) -> hashlib.blake2b:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    fields = kind, struct.pack("<I", FORMAT_VERSION), model.encode(), tokenizer.encode(), pack_ids(prefix_ids)
    for field in (*fields, codec.encode(), salt.encode()):
        _add(digest, field)
    return digest


def _add(digest: hashlib.blake2b, field: bytes) -> None:
    digest.update(struct.pack("<Q", len(field)))
    digest.update(field)
