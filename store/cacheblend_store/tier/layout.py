"""Byte format of a tier's objects.

An object consists of HEAD, a body and, for a chunk, one blob per layer in the store's encoding. The body of a chunk is
its key and manifest (sealed as in the store). Its shape determines the size of each layer, so the size of the object
tells where each layer is. With a cipher, the body and each layer are encrypted separately.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from cacheblend_store.errors import BadBlob
from cacheblend_store.format import records
from cacheblend_store.format.blobs import blob_prefix, blob_size
from cacheblend_store.format.keys import KEY_BYTES, blob_key, pack_ids
from cacheblend_store.format.records import ChunkManifest, DocumentRecord
from cacheblend_store.tier.cipher import SALT_BYTES, TAG_BYTES, Cipher

VERSION = 1
MAGIC = b"CBLENDKV"
HEAD = struct.Struct(f"<8sHHI{SALT_BYTES}s")  # magic, version, 1 if encrypted, bytes of the body, salt
GROUP_BYTES = 4 << 20
WHOLE_BYTES = 8 << 20
MAX_LAYERS = 1024


class DocumentBundle(NamedTuple):
    """A document with the texts of its chunks."""

    record: DocumentRecord
    prefix_key: bytes  # of the prompt's prefix
    texts: tuple[ChunkManifest, ...]  # manifests without KV


@dataclass(frozen=True)
class ObjectLayout:
    """Byte ranges in the object of a chunk."""

    head_bytes: int  # bytes before the first layer
    bounds: tuple[int, ...]  # boundaries of the layers, relative to head_bytes; starts with 0

    @classmethod
    def of(cls, chunk: ChunkManifest, size: int, *, encrypted: bool) -> ObjectLayout:
        """Return the layout of an object of this size. Raises BadBlob if no chunk can have this shape or size."""
        tag = TAG_BYTES if encrypted else 0
        if chunk.num_blobs > MAX_LAYERS:
            raise BadBlob("no chunk can have its shape")
        sizes = (blob_size(records.layer_spec(chunk, layer)) + tag for layer in range(chunk.num_blobs))
        bounds = tuple(accumulate(sizes, initial=0))
        head = size - bounds[-1]
        if not HEAD.size + KEY_BYTES + tag < head <= HEAD.size + KEY_BYTES + records.MAX_MANIFEST_BYTES + tag:
            raise BadBlob(f"its object has {size:,} bytes instead of {bounds[-1]:,} plus a manifest")
        return cls(head, bounds)

    @property
    def num_layers(self) -> int:
        return len(self.bounds) - 1

    @property
    def size(self) -> int:
        return self.head_bytes + self.bounds[-1]

    def groups(self) -> list[range]:
        """Return the layers to read per request: at least GROUP_BYTES, or all layers of an object below WHOLE_BYTES."""
        least = self.size if self.size < WHOLE_BYTES else GROUP_BYTES
        groups, first = [], 0
        for stop in range(1, self.num_layers + 1):
            if stop == self.num_layers or self.bounds[stop] - self.bounds[first] >= least:
                groups.append(range(first, stop))
                first = stop
        return groups

    def span(self, layers: range) -> tuple[int, int]:
        """Return (start, end) of these layers in the object. The range of the first layers includes the head."""
        start = self.head_bytes + self.bounds[layers.start] if layers.start else 0
        return start, self.head_bytes + self.bounds[layers.stop]

    def layer(self, number: int, start: int = 0) -> slice:
        """Return the place of a layer in the bytes of the object that begin at `start`."""
        first = self.head_bytes - start
        return slice(first + self.bounds[number], first + self.bounds[number + 1])


class Head:
    """Decoded head of a chunk's object. manifest: from the writer. num_bytes: bytes before the first layer."""

    def __init__(self, manifest: ChunkManifest, cipher: Cipher | None, salt: bytes, num_bytes: int) -> None:
        self.manifest, self.num_bytes, self._cipher, self._salt = manifest, num_bytes, cipher, salt

    def layer(self, layer: int, data: bytes | memoryview) -> bytes | memoryview:
        """Return a layer's blob, checked. Raises BadBlob."""
        chunk = self.manifest
        if self._cipher is not None:
            data = self._cipher.open(self._salt, layer + 1, data, _about(chunk, layer))
        if bytes(data[: len(prefix := blob_prefix(records.layer_spec(chunk, layer)))]) != prefix:
            raise BadBlob(f"layer {layer} has a header that does not match its tensors")
        if records.blob_digest(chunk.key, layer, chunk.num_tokens, data) != chunk.blob_digests[layer]:
            raise BadBlob(f"layer {layer} does not match its digest")
        return data


def encode_chunk(manifest: ChunkManifest, blobs: Sequence[bytes], name: str, cipher: Cipher | None) -> bytes:
    """Return the object of a chunk. manifest: includes sizes and digests of the blobs."""
    salt, body = _salt(cipher), manifest.key + records.encode_manifest(manifest)
    head = _encode_head(body, salt, name, cipher)
    if cipher is not None:
        blobs = [cipher.seal(salt, layer + 1, blob, _about(manifest, layer)) for layer, blob in enumerate(blobs)]
    return b"".join((head, *blobs))


def decode_head(data: memoryview, name: str, cipher: Cipher | None) -> Head:
    """Open the head of a chunk's object. data: the object from its start. Raises BadBlob."""
    body, salt, num_bytes = _decode_head(data, name, cipher, records.MAX_MANIFEST_BYTES + KEY_BYTES)
    manifest = records.decode_manifest(body[:KEY_BYTES], body[KEY_BYTES:])
    if not manifest.has_kv or not manifest.token_ids:
        raise BadBlob("its object is of a chunk without KV")
    return Head(manifest, cipher, salt, num_bytes)


def encode_body(body: bytes, name: str, cipher: Cipher | None) -> bytes:
    """Return an object without layers."""
    return _encode_head(body, _salt(cipher), name, cipher)


def decode_body(data: memoryview, name: str, cipher: Cipher | None, most: int) -> bytes:
    """Return the body of an object without layers. most: bytes it may have. Raises BadBlob."""
    return _decode_head(data, name, cipher, most)[0]


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
    """Return the associated data of a layer: key, layer and token ids."""
    return blob_key(chunk.key, layer) + pack_ids(chunk.token_ids)
