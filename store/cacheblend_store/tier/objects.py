"""A tier: chunks and documents as objects of an object store."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from cacheblend_store.errors import BadBlob, StoreFormat, TierError, TierNotFound, TierUsage
from cacheblend_store.format import records
from cacheblend_store.format.keys import KEY_BYTES
from cacheblend_store.format.records import ChunkManifest, Memo
from cacheblend_store.tier import layout
from cacheblend_store.tier.cipher import Cipher
from cacheblend_store.tier.layout import DocumentBundle, Head, ObjectLayout
from cacheblend_store.tier.object_stores import ObjectStore, TierObject, check_url, errors_of, open_objects

MAX_CHUNK_BYTES = 16 << 30
MAX_COLLECTION_BYTES = 1 << 20
_ROOT, _DOCUMENTS, _COLLECTION, _MARKER = f"v{layout.VERSION}", "documents", "collection", "cacheblend-tier.json"
_PIECE_BYTES = 8 << 20  # bytes per request, so that the timeout does not depend on the object size
_LISTED = 1000  # objects per listing request
_Parts = tuple[bytes, bytes, list[bytes]]
"""Of a document's object: key and record, the key of the prompt's prefix, and key and manifest of each chunk."""
_NAME = re.compile(rf"{_ROOT}/[0-9a-f]+/(?:{_DOCUMENTS}/)?[0-9a-f]+")


def open_tier(
    url: str,
    key_file: str | Path | None = None,
    *,
    create: bool = True,
    opener: Callable[[str], ObjectStore] | None = None,
) -> Tier:
    """Return the tier at a URL, without sending a request; `check` does that. Raises TierUsage, TierNotFound.

    key_file: file with the secret to encrypt objects. create: create a missing folder if its parent exists. opener:
    opens the object store of a scheme that is not in SCHEMES.
    """
    check_url(url, any_scheme=opener is not None)
    cipher = None if not key_file else Cipher.of_file(Path(key_file).expanduser())
    if opener is not None:
        with errors_of(url):
            return Tier(url, opener(url), cipher)
    store, folder = open_objects(url, create=create)
    return Tier(url, store, cipher, folder)


class Tier:
    """Chunks and documents shared by several stores. cipher: None for a tier without encryption. folder: of a file URL.

    A put is atomic. Do not trust data before `ObjectLayout` has bounded its size and `Head.layer` checked its digest.
    Methods raise TierError, never an error of a library.
    """

    def __init__(self, url: str, store: ObjectStore, cipher: Cipher | None = None, folder: Path | None = None) -> None:
        self.url, self._store, self._cipher, self._folder_path = url, store, cipher, folder
        self._marked = False

    def check(self) -> None:
        """Connect to the tier and check its format. Raises TierError."""
        if not self._may_read(_MARKER):
            raise StoreFormat(f"{_MARKER} at {self.url} is not a regular file", "use another prefix")
        with errors_of(self.url):
            for _ in self._store.list(_ROOT, 1):  # fails if the bucket does not exist
                break
            try:
                found = bytes(self._store.get(_MARKER))
            except FileNotFoundError:
                return
        try:
            marker = json.loads(found[:4096])
            version, key = marker["version"], marker["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreFormat(f"{_MARKER} at {self.url} is not a tier's", "use another prefix") from error
        if version != layout.VERSION:
            raise StoreFormat(
                f"the tier at {self.url} has format {str(version)[:20]}, this version reads {layout.VERSION}",
                "use another prefix, or the version of cacheblend that wrote it",
            )
        if key != self._key_check:
            how = "without a key" if key is None else "with another key" if self._cipher else "with a key"
            raise TierUsage(f"the tier at {self.url} was written {how}", "see --tier-key-file; or use another prefix")
        self._marked = True

    @property
    def _key_check(self) -> str | None:
        return None if self._cipher is None else self._cipher.name("tier")

    def name(self, collection: str, key: bytes) -> str:
        return f"{self._folder(collection)}/{self._hidden(f'{collection}/{key.hex()}', key.hex())}"

    def _folder(self, collection: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{8,64}", collection):
            raise TierError("the collection is not one of a store", "run: cacheblend chunks verify")
        return f"{_ROOT}/{self._hidden(collection, collection)}"

    def _hidden(self, text: str, plain: str) -> str:
        return plain if self._cipher is None else self._cipher.name(text)

    def _document_name(self, collection: str, key: bytes) -> str:
        return f"{self._folder(collection)}/{_DOCUMENTS}/{self._hidden(f'{collection}/d/{key.hex()}', key.hex())}"

    # chunks

    def size(self, name: str) -> int | None:
        """Return the size of an object, or None if it does not exist."""
        if not self._may_read(name):
            return None
        try:
            with errors_of(self.url):
                return self._store.size(name)
        except TierNotFound:
            return None

    def layout(self, chunk: ChunkManifest, size: int) -> ObjectLayout:
        """Return the byte ranges in an object of this size with KV of the chunk's shape. Raises BadBlob."""
        return ObjectLayout.of(chunk, size, encrypted=self._cipher is not None)

    def read(self, name: str, start: int, end: int) -> memoryview:
        if not self._may_read(name):
            raise BadBlob("its object is not a regular file")
        with errors_of(self.url):
            pieces = [
                memoryview(self._store.get(name, at, min(at + _PIECE_BYTES, end)))
                for at in range(start, end, _PIECE_BYTES)
            ]
        data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        if len(data) != end - start:
            raise BadBlob(f"its object is cut off: {len(data):,} of {end - start:,} bytes")
        return data

    def head(self, name: str, data: memoryview) -> Head:
        """Decode the head of a chunk's object. Raises BadBlob if it is damaged or belongs to another chunk."""
        head = layout.decode_head(data, name, self._cipher)
        if self.name(head.manifest.collection, head.manifest.key) != name:
            raise BadBlob("its object belongs to another chunk")
        return head

    def put_chunk(self, manifest: ChunkManifest, blobs: Sequence[bytes]) -> int:
        """Write a chunk with one blob per layer, replacing an existing object. Return the size of the object."""
        whole, name = records.with_digests(manifest, blobs), self.name(manifest.collection, manifest.key)
        return self._put(name, layout.encode_chunk(whole, blobs, name, self._cipher))

    def get_chunk(self, name: str, size: int) -> tuple[ChunkManifest, list[bytes]]:
        """Return the chunk of an object from `chunks`, checked. Raises BadBlob."""
        if size > MAX_CHUNK_BYTES:
            raise BadBlob(f"its object has {size:,} bytes")
        data = self.read(name, 0, size)
        head = self.head(name, data)
        layout = self.layout(head.manifest, size)
        if layout.head_bytes != head.num_bytes:
            raise BadBlob("the size of its object does not match its manifest")
        blobs = [head.layer(i, data[layout.layer(i)]) for i in range(layout.num_layers)]
        return head.manifest, [bytes(blob) for blob in blobs]

    def chunks(self) -> Iterator[TierObject]:
        """Yield the objects of all chunks."""
        return (found for found in self._list() if found.name.count("/") == 2)

    # documents

    def put_document(self, bundle: DocumentBundle) -> None:
        """Write a document and the texts of its chunks, replacing an existing object."""
        record = bundle.record
        name = self._document_name(record.collection, record.key)
        texts = [m.key + records.encode_manifest(m.without_kv()) for m in bundle.texts]
        parts: _Parts = (record.key + records.encode_document(record), bundle.prefix_key, texts)
        body = records.seal(name.encode(), msgspec.msgpack.encode(parts))
        self._put(name, layout.encode_body(body, name, self._cipher))

    def get_document(self, name: str, size: int) -> DocumentBundle:
        """Return the document of an object from `documents`, checked. Raises BadBlob."""
        if size > records.MAX_DOCUMENT_BYTES:
            raise BadBlob(f"a document of {size:,} bytes")
        body = layout.decode_body(self.read(name, 0, size), name, self._cipher, records.MAX_DOCUMENT_BYTES)
        with records.readable("the document"):
            raw, prefix_key, texts = msgspec.msgpack.decode(records.unseal(name.encode(), body), type=_Parts)
        record = records.decode_document(raw[: records.DIGEST_BYTES], raw[records.DIGEST_BYTES :])
        manifests = tuple(
            replace(records.decode_manifest(text[:KEY_BYTES], text[KEY_BYTES:]), blob_digests=()).without_kv()
            for text in texts
        )
        known = {m.key for m in manifests if m.collection == record.collection}
        if self._document_name(record.collection, record.key) != name or not {c.key for c in record.chunks} <= known:
            raise BadBlob("its object is another document's, or lacks texts")
        return DocumentBundle(record, prefix_key, manifests)

    def documents(self) -> Iterator[TierObject]:
        """Yield the objects of all documents."""
        return (found for found in self._list() if found.name.count("/") == 3)

    # collections

    def put_collection(self, memo: Memo) -> None:
        """Write a collection's memo, replacing an existing object."""
        name = self._collection_name(memo.name)
        self._put(name, layout.encode_body(records.encode_memo(memo), name, self._cipher))

    def get_collection(self, collection: str) -> Memo | None:
        """Return a collection's memo, checked; None if it does not exist. Raises BadBlob."""
        name = self._collection_name(collection)
        if (size := self.size(name)) is None:
            return None
        if size > 2 * MAX_COLLECTION_BYTES:
            raise BadBlob(f"a collection's record of {size:,} bytes")
        body = layout.decode_body(self.read(name, 0, size), name, self._cipher, MAX_COLLECTION_BYTES)
        memo = records.decode_memo(records.memo_key(records.COLLECTION, collection), body)
        if (memo.kind, memo.name) != (records.COLLECTION, collection):
            raise BadBlob("its object is another collection's")
        return memo

    def _collection_name(self, collection: str) -> str:
        return f"{self._folder(collection)}/{_COLLECTION}"

    # objects

    def _may_read(self, name: str) -> bool:
        """Return False for a FIFO, a device or a link in a folder: reading could block for ever, or lead elsewhere."""
        if self._folder_path is None:
            return True
        try:
            return stat.S_ISREG(os.lstat(self._folder_path / name).st_mode)
        except OSError:
            return True  # the request reports it

    def delete(self, names: Iterable[str]) -> None:
        """Delete up to 1,000 objects."""
        with errors_of(self.url):
            self._store.delete(list(names))

    def _put(self, name: str, data: bytes) -> int:
        with errors_of(self.url):
            if not self._marked:
                marker = json.dumps({"version": layout.VERSION, "key": self._key_check}).encode()
                self._store.put(_MARKER, marker)
                self._marked = True
            self._store.put(name, data)
        return len(data)

    def _list(self) -> Iterator[TierObject]:
        with errors_of(self.url):
            yield from (found for found in self._store.list(_ROOT, _LISTED) if _NAME.fullmatch(found.name))
