"""The manifest of an export: JSON lines of what is in it, and the layout of a chunk's file.

The first line says what the file is, the last one how much is in it; between them a line a collection, chunk and
document. A chunk's line holds the SHA-256 of its file, so a signature over the manifest covers everything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_store.archive.files import SUFFIX
from cacheblend_store.errors import ArchiveError
from cacheblend_store.format.blobs import BlobSpec, TensorSpec, blob_prefix, blob_size
from cacheblend_store.format.keys import FORMAT_VERSION, KEY_BYTES, KeyParts, chunk_key, collection_id
from cacheblend_store.format.layouts import CODECS, blob_spec
from cacheblend_store.format.plain_json import Check, check_fields, is_count, is_size, is_text, load_object
from cacheblend_store.format.records import (
    DOCUMENT_CHECKS,
    MANIFEST_CHECKS,
    ChunkManifest,
    DocumentChunk,
    DocumentRecord,
)

ARCHIVE_VERSIONS = (1, 2)  # 2: with chunks that have no KV
MAX_LINE_BYTES = 12 << 20
_CONTEXTS = ("prefix", "sink", "document", "neighbours")
_DAMAGED = "the archive is damaged: get it again"


# what a line may hold


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _is_key(value: Any) -> bool:
    return _is_hex(value, 2 * KEY_BYTES)


def _is_list(value: Any, check: Check) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _are_token_ids(value: Any) -> bool:
    return _is_list(value, lambda i: type(i) is int and 0 <= i < 1 << 32)


def _is_place(value: Any) -> bool:
    try:
        return _is_key(value[0]) and DocumentChunk.of_row(value) is not None
    except (ValueError, TypeError, LookupError):
        return False


def _are_settings(value: Any) -> bool:
    return isinstance(value, dict) and all(v is None or isinstance(v, (str, int, float)) for v in value.values())


_CHUNK = {name: check for name, check in MANIFEST_CHECKS.items() if name != "blob_sizes"} | {
    "type": is_text, "id": _is_key, "bytes": is_count, "sha256": lambda value: value == "" or _is_hex(value, 64),
    "token_ids": lambda value: _are_token_ids(value) and value, "left_context_ids": _are_token_ids,
    "left_context_keys": lambda value: _is_list(value, _is_key), "context": _CONTEXTS.__contains__,
    "codec": CODECS.__contains__, "num_layers": lambda value: is_size(value) and value <= 1024,
}  # fmt: skip
_COLLECTION = dict.fromkeys(("type", "id", "model", "tokenizer"), is_text) | {
    "codec": CODECS.__contains__, "prefix_ids": lambda value: value is None or _are_token_ids(value),
    "salted": lambda value: isinstance(value, bool),
}  # fmt: skip
_DOCUMENT = DOCUMENT_CHECKS | {
    "type": is_text, "chunks": lambda value: _is_list(value, _is_place), "settings": _are_settings,
    "context": _CONTEXTS[1:].__contains__,
}  # fmt: skip


def _checked(record: Mapping[str, Any], checks: Mapping[str, Check], name: Any) -> Mapping[str, Any]:
    """The record, which has just the fields that are checked. Raises ArchiveError."""
    try:
        check_fields(record, checks)
        if record.keys() != checks.keys():
            raise ValueError("it has an unknown field")
    except (ValueError, KeyError, TypeError) as error:
        what = f"the manifest's record of {record['type']} {str(name)[:40]!r}"
        raise ArchiveError(f"{what} is not what it should be: {error}"[:300], _DAMAGED) from error
    return record


# lines


def encode_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode("ascii") + b"\n"


def decode_line(line: bytes, number: int) -> dict[str, Any]:
    """Raises ArchiveError when it is no JSON object."""
    try:
        return load_object(line.decode("ascii"), MAX_LINE_BYTES)
    except ValueError as error:
        raise ArchiveError(f"line {number} of the manifest is no record: {error}"[:200], _DAMAGED) from error


def sign(sign_key: bytes, lines: Iterable[bytes]) -> bytes:
    """The content of `manifest.hmac`."""
    digest = hmac.new(sign_key, digestmod=hashlib.sha256)
    for line in lines:
        digest.update(line)
    return f"hmac-sha256 {digest.hexdigest()}\n".encode()


def first_line(*, whole: bool = True) -> dict[str, Any]:
    """whole: every chunk has KV, which is what the first version of archives holds."""
    version = ARCHIVE_VERSIONS[0 if whole else 1]
    return {"type": "cacheblend-export", "version": version, "store_format": FORMAT_VERSION}


def last_line(collections: int, chunks: int, documents: int) -> dict[str, Any]:
    return {"type": "end", "collections": collections, "chunks": chunks, "documents": documents}


def check_first_line(record: Mapping[str, Any]) -> None:
    if record.get("type") != "cacheblend-export":
        raise ArchiveError("this is no export of cacheblend", "make one: cacheblend chunks export PATH")
    if record.get("version") not in ARCHIVE_VERSIONS or record.get("store_format") != FORMAT_VERSION:
        raise ArchiveError(
            f"the export has version {record.get('version')!r} and store format {record.get('store_format')!r}, and "
            f"{ARCHIVE_VERSIONS[-1]} and {FORMAT_VERSION} are read here",
            "export it again with this version of cacheblend",
        )


# chunks


@dataclass(frozen=True)
class ChunkLine:
    """A chunk of an export: its manifest (no blob digests yet), and size and SHA-256 of its file. One without KV has no
    file: 0 and ""."""

    manifest: ChunkManifest
    size: int
    sha256: str

    @property
    def file(self) -> str:
        return self.manifest.id + SUFFIX


def chunk_record(line: ChunkLine) -> dict[str, Any]:
    skip = ("key", "blob_sizes", "blob_digests", "left_context_keys")
    facts = {name: value for name, value in vars(line.manifest).items() if name not in skip}
    keys = [key.hex() for key in line.manifest.left_context_keys]
    head = {"type": "chunk", "id": line.manifest.id, "sha256": line.sha256, "bytes": line.size}
    return {**head, **facts, "left_context_keys": keys}


def parse_chunk(record: Mapping[str, Any]) -> ChunkLine:
    """Raises ArchiveError unless every field is there, of its type and in its range, and the size what they imply."""
    fields = dict(_checked(record, _CHUNK, record.get("id")))
    size, sha256, key = fields.pop("bytes"), fields.pop("sha256"), bytes.fromhex(fields.pop("id"))
    del fields["type"]
    for name in ("token_ids", "left_context_ids", "span"):
        fields[name] = tuple(fields[name])
    fields["left_context_keys"] = tuple(map(bytes.fromhex, fields["left_context_keys"]))
    manifest = ChunkManifest(key=key, **fields)
    if manifest.codec == "int4" and manifest.head_dim % 2:
        raise ArchiveError(f"chunk {manifest.id[:12]} is of a shape that no chunk has", _DAMAGED)
    if size and size != blob_size(file_spec(manifest)):
        raise ArchiveError(f"chunk {manifest.id[:12]} has {size:,} bytes, and its shape implies another number")
    return ChunkLine(manifest, size, sha256)


def layer_spec(manifest: ChunkManifest) -> BlobSpec:
    return blob_spec(manifest.codec, manifest.num_tokens, manifest.num_kv_heads, manifest.head_dim)


def file_spec(manifest: ChunkManifest) -> BlobSpec:
    """Of a chunk's safetensors file: tensors layers.0.k, layers.0.v, ... in order."""
    layer, whole = layer_spec(manifest), dict[str, TensorSpec]()
    for number in range(manifest.num_layers):
        whole.update({f"layers.{number}.{name}": tensor for name, tensor in layer.items()})
    return whole


def blobs_of(line: ChunkLine, data: bytes) -> list[bytes]:
    """A blob a layer, out of the chunk's file. Raises ArchiveError when the file is not what its line says."""
    header, start = blob_prefix(file_spec(line.manifest)), blob_prefix(layer_spec(line.manifest))
    if not data.startswith(header):
        raise ArchiveError(f"the header of {line.file} is not what its record implies")
    if hashlib.sha256(data).hexdigest() != line.sha256:
        raise ArchiveError(f"{line.file} does not match its digest")
    view = memoryview(data)[len(header) :]
    size = len(view) // line.manifest.num_layers
    return [start + view[layer * size : (layer + 1) * size] for layer in range(line.manifest.num_layers)]


# collections and documents


@dataclass(frozen=True)
class CollectionLine:
    """What the keys of a collection's chunks are made of, to make them again. prefix_ids None: not known."""

    id: str
    parts: KeyParts
    prefix_ids: tuple[int, ...] | None
    salted: bool

    def check(self, manifest: ChunkManifest) -> None:
        """Raises ArchiveError unless the chunk is of this collection, and its key the digest of what it claims to be."""
        of = (manifest.model, manifest.tokenizer, manifest.codec)
        if of != (self.parts.model, self.parts.tokenizer, self.parts.codec):
            raise ArchiveError(f"chunk {manifest.id[:12]} is not of the collection it names")
        if self.prefix_ids is None:
            return
        is_prefix = manifest.context == "prefix"
        before = () if is_prefix else self.prefix_ids
        parts = KeyParts(*of[:2], before, manifest.left_context_ids, manifest.codec, self.parts.salt)
        if chunk_key(parts, manifest.token_ids) != manifest.key:
            raise ArchiveError(f"the id of chunk {manifest.id[:12]} is not the digest of its tokens")
        if manifest.collected_len != len(before) + len(manifest.left_context_ids) + manifest.num_tokens:
            raise ArchiveError(f"chunk {manifest.id[:12]} was not collected in {manifest.collected_len} tokens")
        if is_prefix and manifest.token_ids != self.prefix_ids:
            raise ArchiveError(f"chunk {manifest.id[:12]} is not the prefix of its collection")


def collection_record(line: CollectionLine) -> dict[str, Any]:
    return {
        "type": "collection", "id": line.id, "model": line.parts.model, "tokenizer": line.parts.tokenizer,
        "codec": line.parts.codec, "prefix_ids": line.prefix_ids, "salted": line.salted,
    }  # fmt: skip


def parse_collection(record: Mapping[str, Any], salt: str) -> CollectionLine:
    """salt: of this import. Raises ArchiveError when the id is not the digest of the rest."""
    fields = _checked(record, _COLLECTION, record.get("id"))
    salted, ids = fields["salted"], fields["prefix_ids"]
    parts = KeyParts(fields["model"], fields["tokenizer"], ids or (), (), fields["codec"], salt if salted else "")
    line = CollectionLine(fields["id"], parts, None if ids is None else tuple(ids), salted)
    if salted and not salt:
        raise ArchiveError("chunks of the archive were stored with a salt", "give the same --salt")
    if ids is not None and collection_id(parts) != line.id:
        hint = "give the --salt they were stored with" if salted else "the archive was changed: do not use it"
        raise ArchiveError(f"the id of collection {line.id[:12]!r} is not the digest of what it names", hint)
    return line


def document_record(document: DocumentRecord) -> dict[str, Any]:
    chunks = [chunk.row() for chunk in document.chunks]
    return {"type": "document", **vars(document), "chunks": chunks}


def parse_document(record: Mapping[str, Any]) -> DocumentRecord:
    """Raises ArchiveError."""
    fields = dict(_checked({"context": "sink", **record}, _DOCUMENT, record.get("source")))
    del fields["type"]
    fields["chunks"] = tuple(map(DocumentChunk.of_row, fields["chunks"]))
    return DocumentRecord(**fields)
