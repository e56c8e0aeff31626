"""The manifest of an export: JSON lines of what is in it, each of a schema that allows nothing else.

The first line says what the file is, the last one how much is in it; between them a line a collection, chunk and
document. A chunk's line holds the SHA-256 of its file, so a signature over the manifest covers everything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct, convert, to_builtins

from cacheblend_store.archive.files import DAMAGED, SUFFIX
from cacheblend_store.errors import ArchiveError
from cacheblend_store.format.blobs import CODECS, BlobSpec, TensorSpec, blob_prefix, blob_size, blob_spec
from cacheblend_store.format.keys import FORMAT_VERSION, KeyParts, chunk_key, collection_id
from cacheblend_store.format.plain_json import Count, TokenIds, load_object
from cacheblend_store.format.records import ChunkManifest, DocumentRecord

ARCHIVE_VERSION = 3
MAX_LINE_BYTES = 12 << 20
MAX_LAYERS = 1024
CONTEXTS = ("prefix", "sink", "document", "neighbours")


class Head(Struct, frozen=True, tag="cacheblend-export"):
    """The first line: what the file is."""

    version: int = ARCHIVE_VERSION
    store_format: int = FORMAT_VERSION


class CollectionLine(Struct, frozen=True, forbid_unknown_fields=True, tag="collection"):
    """What the keys of a collection's chunks are made of, to make them again. prefix_ids None: not known."""

    id: str
    model: str
    tokenizer: str
    codec: str
    prefix_ids: TokenIds | None
    salted: bool

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


class ChunkLine(Struct, frozen=True, forbid_unknown_fields=True, tag="chunk"):
    """A chunk of an export. file: its name, size and SHA-256; 0 and "" of one without KV, which has no file. manifest: names
    no blobs."""

    file: str
    num_bytes: Count
    sha256: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    manifest: ChunkManifest

    @classmethod
    def of(cls, manifest: ChunkManifest, source: str, data: bytes) -> ChunkLine:
        """data: what is in its file."""
        named = replace(manifest, source=source, blob_sizes=(), blob_digests=())
        return cls(manifest.id + SUFFIX, len(data), hashlib.sha256(data).hexdigest() if data else "", named)

    def __post_init__(self) -> None:
        chunk = self.manifest
        if self.file != chunk.id + SUFFIX or chunk.blob_sizes or chunk.blob_digests:
            raise ValueError("its file is not named by its key, or it names blobs")
        if chunk.context not in CONTEXTS or chunk.num_layers > MAX_LAYERS or not chunk.token_ids:
            raise ValueError("no chunk has such a context, or as many layers or tokens")
        if chunk.codec not in CODECS or (chunk.codec == "int4" and chunk.head_dim % 2):
            raise ValueError("no codec is of that name or stores that shape")
        if self.num_bytes and self.num_bytes != blob_size(file_spec(chunk)):
            raise ValueError(f"its shape implies another number than {self.num_bytes:,} bytes")

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


class DocumentLine(Struct, frozen=True, forbid_unknown_fields=True, tag="document"):
    record: DocumentRecord

    def __post_init__(self) -> None:
        settings = self.record.settings.values()
        if self.record.context not in CONTEXTS[1:] or any(isinstance(v, (dict, list)) for v in settings):
            raise ValueError("no document has such a context or such settings")


class End(Struct, frozen=True, forbid_unknown_fields=True, tag="end"):
    """The last line: how many lines of each kind are before it."""

    collections: int
    chunks: int
    documents: int


Line = Head | CollectionLine | ChunkLine | DocumentLine | End


def encode_line(line: Line) -> bytes:
    return json.dumps(to_builtins(line)).encode("ascii") + b"\n"


def manifest_file(
    collections: Collection[CollectionLine], chunks: Sequence[bytes], documents: Sequence[DocumentRecord]
) -> bytes:
    """All lines, those of the chunks as they were encoded."""
    end = End(len(collections), len(chunks), len(documents))
    head: list[Line] = [Head(), *collections]
    tail: list[Line] = [*map(DocumentLine, documents), end]
    return b"".join((*map(encode_line, head), *chunks, *map(encode_line, tail)))


def decode_line(text: bytes, number: int) -> Line:
    """The number'th line, from 1 on. Raises ArchiveError when it is not what it should be."""
    try:
        line: Line = convert(load_object(text, MAX_LINE_BYTES), Line)
    except (ValueError, TypeError) as error:
        raise ArchiveError(f"line {number} of the manifest is not what it should be: {error}"[:300], DAMAGED) from error
    if isinstance(line, Head) != (number == 1):
        raise ArchiveError("this is no export of cacheblend", "make one: cacheblend chunks export PATH")
    if isinstance(line, Head) and line != Head():
        raise ArchiveError(
            f"the export has version {line.version} and store format {line.store_format}, and {ARCHIVE_VERSION} and "
            f"{FORMAT_VERSION} are read here",
            "export it again with this version of cacheblend",
        )
    return line


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
