"""Byte format of a tier's objects.

An object begins with HEAD; then comes the manifest, sealed as in the store, behind its key; then, of a chunk, one blob
a layer, as the store has them. All layers of a chunk are of one size, which its shape gives, so the size of the object
tells where each layer is. With a cipher the manifest and each layer are encrypted by themselves.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec

from cacheblend_store.errors import BadBlob
from cacheblend_store.format.blobs import CODECS, blob_prefix, blob_size
from cacheblend_store.format.keys import KEY_BYTES, blob_key, pack_ids
from cacheblend_store.format.records import (
    COLLECTION,
    MAX_DOCUMENT_BYTES,
    MAX_MANIFEST_BYTES,
    ChunkManifest,
    DocumentRecord,
    Memo,
    blob_digest,
    decode_manifest,
    decode_memo,
    encode_manifest,
    encode_memo,
    layer_spec,
    memo_key,
    seal,
    unseal,
)
from cacheblend_store.tier.cipher import SALT_BYTES, TAG_BYTES, Cipher

VERSION = 1
MAGIC = b"CBLENDKV"
HEAD = struct.Struct(f"<8sHHI{SALT_BYTES}s")  # magic, version, 1 if encrypted, bytes of the manifest, salt
GROUP_BYTES = 4 << 20
WHOLE_BYTES = 8 << 20
MAX_LAYERS = 1024
MAX_COLLECTION_BYTES = 1 << 20


class DocumentBundle(NamedTuple):
    """A document with the texts of its chunks. prefix_key: key of the prompt's prefix. texts: manifests without KV."""

    record: DocumentRecord
    prefix_key: bytes
    texts: tuple[ChunkManifest, ...]


@dataclass(frozen=True)
class Layout:
    """Places in the object of a chunk. head_bytes: up to the first layer; bounds: the end of each layer behind that,
    from 0 on."""

    head_bytes: int
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, chunk: ChunkManifest, size: int, *, encrypted: bool) -> Layout:
        """Raises BadBlob for a shape or a size that no chunk has."""
        tag = TAG_BYTES if encrypted else 0
        if chunk.num_layers > MAX_LAYERS or chunk.codec not in CODECS:
            raise BadBlob("its shape is one that no chunk has")
        sizes = (blob_size(layer_spec(chunk, layer)) + tag for layer in range(chunk.num_layers))
        bounds = tuple(accumulate(sizes, initial=0))
        head = size - bounds[-1]
        if not HEAD.size + KEY_BYTES + tag < head <= HEAD.size + KEY_BYTES + MAX_MANIFEST_BYTES + tag:
            raise BadBlob(f"its object has {size:,} bytes, and {bounds[-1]:,} and a manifest are implied")
        return cls(head, bounds)

    @property
    def num_layers(self) -> int:
        return len(self.bounds) - 1

    @property
    def size(self) -> int:
        return self.head_bytes + self.bounds[-1]

    def groups(self) -> list[range]:
        """Return the layers by request: GROUP_BYTES or more, or all of an object below WHOLE_BYTES."""
        least = self.size if self.size < WHOLE_BYTES else GROUP_BYTES
        groups, first = [], 0
        for stop in range(1, self.num_layers + 1):
            if stop == self.num_layers or self.bounds[stop] - self.bounds[first] >= least:
                groups.append(range(first, stop))
                first = stop
        return groups

    def span(self, layers: range) -> tuple[int, int]:
        """Return start and end of these layers in the object, of the first ones with the head."""
        start = self.head_bytes + self.bounds[layers.start] if layers.start else 0
        return start, self.head_bytes + self.bounds[layers.stop]

    def layer(self, number: int, start: int = 0) -> slice:
        """Return the place of a layer in the bytes of the object from `start` on."""
        first = self.head_bytes - start
        return slice(first + self.bounds[number], first + self.bounds[number + 1])


class Head:
    """The opened beginning of a chunk's object. manifest: as its writer made it. num_bytes: up to the first layer."""

    def __init__(self, manifest: ChunkManifest, cipher: Cipher | None, salt: bytes, num_bytes: int) -> None:
        self.manifest, self.num_bytes, self._cipher, self._salt = manifest, num_bytes, cipher, salt

    def layer(self, layer: int, data: bytes | memoryview) -> bytes | memoryview:
        """Return a layer's blob, checked. Raises BadBlob."""
        chunk = self.manifest
        if self._cipher is not None:
            data = self._cipher.open(self._salt, layer + 1, data, _about(chunk, layer))
        if bytes(data[: len(prefix := blob_prefix(layer_spec(chunk, layer)))]) != prefix:
            raise BadBlob(f"layer {layer} has a header that does not match its tensors", key=chunk.key, layer=layer)
        if blob_digest(chunk.key, layer, chunk.num_tokens, data) != chunk.blob_digests[layer]:
            raise BadBlob(f"layer {layer} does not match its digest", key=chunk.key, layer=layer)
        return data


def encode_chunk(manifest: ChunkManifest, blobs: Sequence[bytes], name: str, cipher: Cipher | None) -> bytes:
    """Return the object of a chunk. manifest: with sizes and digests of the blobs."""
    salt, body = _salt(cipher), manifest.key + encode_manifest(manifest)
    head = _encode_head(body, salt, name, cipher)
    if cipher is not None:
        blobs = [cipher.seal(salt, layer + 1, blob, _about(manifest, layer)) for layer, blob in enumerate(blobs)]
    return b"".join((head, *blobs))


def decode_head(data: memoryview, name: str, cipher: Cipher | None) -> Head:
    """Open the head of a chunk's object. data: the object from its start. Raises BadBlob."""
    body, salt, num_bytes = _decode_head(data, name, cipher, MAX_MANIFEST_BYTES + KEY_BYTES)
    manifest = decode_manifest(body[:KEY_BYTES], body[KEY_BYTES:])
    if not manifest.has_kv or not manifest.token_ids:
        raise BadBlob("its object is of a chunk without KV")
    return Head(manifest, cipher, salt, num_bytes)


def encode_bundle(parts: tuple[bytes, bytes, list[bytes]], name: str, cipher: Cipher | None) -> bytes:
    """Return the object of a document. parts: its record, the key of the prefix, records of its chunks behind their
    keys."""
    return _encode_head(seal(name.encode(), msgspec.msgpack.encode(parts)), _salt(cipher), name, cipher)


def decode_bundle(data: memoryview, name: str, cipher: Cipher | None) -> tuple[bytes, bytes, list[bytes]]:
    """Return the parts that `encode_bundle` took. Raises BadBlob."""
    body, _, _ = _decode_head(data, name, cipher, MAX_DOCUMENT_BYTES)
    try:
        return msgspec.msgpack.decode(unseal(name.encode(), body), type=tuple[bytes, bytes, list[bytes]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBlob(f"the document does not read: {error}") from error


def encode_collection(memo: Memo, name: str, cipher: Cipher | None) -> bytes:
    """Return the object of a collection's memo."""
    return _encode_head(encode_memo(memo), _salt(cipher), name, cipher)


def decode_collection(data: memoryview, collection: str, name: str, cipher: Cipher | None) -> Memo:
    """Return the memo. Raises BadBlob if it is damaged, or another collection's."""
    body, _, _ = _decode_head(data, name, cipher, MAX_COLLECTION_BYTES)
    memo = decode_memo(memo_key(COLLECTION, collection), body)
    if (memo.kind, memo.name) != (COLLECTION, collection):
        raise BadBlob("its object is another collection's")
    return memo


def _salt(cipher: Cipher | None) -> bytes:
    return bytes(SALT_BYTES) if cipher is None else os.urandom(SALT_BYTES)


def _encode_head(body: bytes, salt: bytes, name: str, cipher: Cipher | None) -> bytes:
    if cipher is not None:
        body = cipher.seal(salt, 0, body, name.encode())
    return HEAD.pack(MAGIC, VERSION, cipher is not None, len(body), salt) + body


def _decode_head(data: memoryview, name: str, cipher: Cipher | None, most: int) -> tuple[bytes, bytes, int]:
    """Return (body, salt, bytes of both)."""
    if len(data) < HEAD.size:
        raise BadBlob("its object is cut off")
    magic, version, encrypted, size, salt = HEAD.unpack(data[: HEAD.size])
    if (magic, version) != (MAGIC, VERSION) or not (encrypted or salt == bytes(SALT_BYTES)):
        raise BadBlob("its object has another format")
    if encrypted != (cipher is not None):
        raise BadBlob("its object is encrypted" if encrypted else "its object is not encrypted")
    if size > most + TAG_BYTES or size > len(data) - HEAD.size:
        raise BadBlob("its object is cut off, or its manifest is too long")
    body = bytes(data[HEAD.size : HEAD.size + size])
    return (body if cipher is None else cipher.open(salt, 0, body, name.encode())), salt, HEAD.size + size


def _about(chunk: ChunkManifest, layer: int) -> bytes:
    """Return what a layer is bound to: key, layer and token ids."""
    return blob_key(chunk.key, layer) + pack_ids(chunk.token_ids)
