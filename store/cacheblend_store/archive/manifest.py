"""The manifest of an export: JSON lines of what is in it, each of a schema that allows nothing else.

The first line says what the file is, the last one how much is in it; between them a line a collection, chunk and
document. A chunk's line holds the SHA-256 of its file, so a signature over the manifest covers everything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from cacheblend_store.archive.files import DAMAGED, SUFFIX
from cacheblend_store.errors import ArchiveError
from cacheblend_store.format.blobs import BlobSpec, TensorSpec, blob_prefix, blob_size
from cacheblend_store.format.keys import FORMAT_VERSION, KeyParts, chunk_key, collection_id
from cacheblend_store.format.layouts import CODECS, blob_spec
from cacheblend_store.format.plain_json import Count, TokenIds, load_object, typed
from cacheblend_store.format.records import ChunkManifest, DocumentRecord, document_of

ARCHIVE_VERSION = 2  # 1 had no chunks without KV, and reads the same
MAX_LINE_BYTES = 12 << 20
MAX_LAYERS = 1024
CONTEXTS = ("prefix", "sink", "document", "neighbours")


def encode_line(kind: str, facts: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, **facts}).encode("ascii") + b"\n"


def first_line() -> bytes:
    return encode_line("cacheblend-export", {"version": ARCHIVE_VERSION, "store_format": FORMAT_VERSION})


@dataclass(frozen=True)
class CollectionLine:
    """What the keys of a collection's chunks are made of, to make them again. prefix_ids None: not known."""

    id: str
    model: str
    tokenizer: str
    codec: str
    prefix_ids: TokenIds | None
    salted: bool

    def encoded(self) -> bytes:
        return encode_line("collection", vars(self))

    def parts(self, salt: str) -> KeyParts:
        used = salt if self.salted else ""
        return KeyParts(self.model, self.tokenizer, self.prefix_ids or (), (), self.codec, used)

    def check(self, salt: str) -> None:
        """Raises ArchiveError when the id is not the digest of the rest and the salt of this import."""
        if self.salted and not salt:
            raise ArchiveError("chunks of the archive were stored with a salt", "give the same --salt")
        if self.prefix_ids is not None and collection_id(self.parts(salt)) != self.id:
            hint = "give the --salt they were stored with" if self.salted else "the archive was changed: do not use it"
            raise ArchiveError(f"the id of collection {self.id[:12]!r} is not the digest of what it names", hint)

    def check_chunk(self, chunk: ChunkManifest, salt: str) -> None:
        """Raises ArchiveError unless the chunk is of this collection, and its id the digest of what it claims to be."""
        name = f"chunk {chunk.id[:12]}"
        if (chunk.model, chunk.tokenizer, chunk.codec) != (self.model, self.tokenizer, self.codec):
            raise ArchiveError(f"{name} is not of the collection it names", DAMAGED)
        if self.prefix_ids is None:
            return
        is_prefix = chunk.context == "prefix"
        before = () if is_prefix else self.prefix_ids
        parts = replace(self.parts(salt), prefix_ids=before, left_context_ids=chunk.left_context_ids)
        if (
            chunk_key(parts, chunk.token_ids) != chunk.key
            or chunk.collected_len != len(before) + len(chunk.left_context_ids) + chunk.num_tokens
            or (is_prefix and chunk.token_ids != self.prefix_ids)
        ):
            raise ArchiveError(f"the id of {name} is not the digest of what it is made of", DAMAGED)


@dataclass(frozen=True)
class ChunkLine:
    """A chunk of an export: its manifest (no blobs named yet), and size and SHA-256 of its file. One without KV has no
    file: 0 and ""."""

    manifest: ChunkManifest
    num_bytes: Count
    sha256: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]

    @property
    def file(self) -> str:
        return self.manifest.id + SUFFIX

    def encoded(self) -> bytes:
        facts = {name: value for name, value in vars(self.manifest).items() if name not in _NOT_WRITTEN}
        keys = [key.hex() for key in self.manifest.left_context_keys]
        head = {"id": self.manifest.id, "sha256": self.sha256, "bytes": self.num_bytes}
        return encode_line("chunk", {**head, **facts, "left_context_keys": keys})

    def blobs(self, data: bytes) -> list[bytes]:
        """A blob a layer, out of the chunk's file. Raises ArchiveError when the file is not what this line says."""
        header, start = blob_prefix(file_spec(self.manifest)), blob_prefix(layer_spec(self.manifest))
        if not data.startswith(header):
            raise ArchiveError(f"the header of {self.file} is not what its record implies")
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ArchiveError(f"{self.file} does not match its digest")
        view = memoryview(data)[len(header) :]
        size = len(view) // self.manifest.num_layers
        return [start + view[layer * size : (layer + 1) * size] for layer in range(self.manifest.num_layers)]


_NOT_WRITTEN = ("key", "blob_sizes", "blob_digests")


def _chunk(fields: dict[str, Any]) -> ChunkLine:
    key, num_bytes, sha256 = bytes.fromhex(fields.pop("id")), fields.pop("bytes"), fields.pop("sha256")
    keys = [bytes.fromhex(key) for key in fields.pop("left_context_keys")]
    if not fields.keys().isdisjoint(_NOT_WRITTEN):
        raise ValueError("it has an unknown field")
    manifest = typed({**fields, "key": key, "left_context_keys": keys}, ChunkManifest)
    line = typed({"manifest": manifest, "num_bytes": num_bytes, "sha256": sha256}, ChunkLine)
    if manifest.context not in CONTEXTS or manifest.num_layers > MAX_LAYERS or not manifest.token_ids:
        raise ValueError("no chunk has such a context, or as many layers or tokens")
    if manifest.codec not in CODECS or (manifest.codec == "int4" and manifest.head_dim % 2):
        raise ValueError("no codec is of that name or stores that shape")
    if num_bytes and num_bytes != blob_size(file_spec(manifest)):
        raise ValueError(f"its shape implies another number than {num_bytes:,} bytes")
    return line


def document_line(document: DocumentRecord) -> bytes:
    return encode_line("document", {**vars(document), "chunks": [chunk.row() for chunk in document.chunks]})


def _document(fields: dict[str, Any]) -> DocumentRecord:
    document = document_of(fields)
    if document.context not in CONTEXTS[1:] or any(isinstance(v, (dict, list)) for v in document.settings.values()):
        raise ValueError("no document has such a context or such settings")
    return document


@dataclass(frozen=True)
class End:
    """The last line: how many lines of each kind are before it."""

    collections: int
    chunks: int
    documents: int

    def encoded(self) -> bytes:
        return encode_line("end", vars(self))


AnyLine = CollectionLine | ChunkLine | DocumentRecord | End
_READERS: dict[str, Callable[[dict[str, Any]], AnyLine]] = {
    "collection": lambda fields: typed(fields, CollectionLine),
    "chunk": _chunk,
    "document": _document,
    "end": lambda fields: typed(fields, End),
}


def decode_line(text: bytes, number: int) -> AnyLine | None:
    """The number'th line, from 1 on; None for the first, which says what the file is. Raises ArchiveError when it is not
    what it should be."""
    try:
        fields = load_object(text.decode("ascii"), MAX_LINE_BYTES)
        kind = fields.pop("type")
        if number > 1:
            return _READERS[kind](fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"line {number} of the manifest is not what it should be: {error}"[:300], DAMAGED) from error
    if kind != "cacheblend-export":
        raise ArchiveError("this is no export of cacheblend", "make one: cacheblend chunks export PATH")
    version, store_format = fields.get("version"), fields.get("store_format")
    if version not in range(1, ARCHIVE_VERSION + 1) or store_format != FORMAT_VERSION:
        raise ArchiveError(
            f"the export has version {version!r} and store format {store_format!r}, and {ARCHIVE_VERSION} and "
            f"{FORMAT_VERSION} are read here",
            "export it again with this version of cacheblend",
        )
    return None


def sign(sign_key: bytes, manifest: bytes) -> bytes:
    """The content of `manifest.hmac`."""
    return f"hmac-sha256 {hmac.new(sign_key, manifest, hashlib.sha256).hexdigest()}\n".encode()


def layer_spec(chunk: ChunkManifest) -> BlobSpec:
    return blob_spec(chunk.codec, chunk.num_tokens, chunk.num_kv_heads, chunk.head_dim)


def file_spec(chunk: ChunkManifest) -> BlobSpec:
    """Of a chunk's safetensors file: tensors layers.0.k, layers.0.v, ... in order."""
    layer, whole = layer_spec(chunk), dict[str, TensorSpec]()
    for number in range(chunk.num_layers):
        whole.update({f"layers.{number}.{name}": tensor for name, tensor in layer.items()})
    return whole
