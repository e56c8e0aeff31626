"""The manifest of an export: JSON lines of what is in it, and the layout of a chunk's file.

The first line says what the file is, the last one how much is in it; between them a line a collection, chunk and
document. A chunk's line holds the SHA-256 of its file, so a signature over the manifest covers everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_store.archive.input import SUFFIX
from cacheblend_store.errors import ArchiveError
from cacheblend_store.format.blobs import BlobSpec, TensorSpec, blob_prefix
from cacheblend_store.format.keys import FORMAT_VERSION, KEY_BYTES, KeyParts, chunk_key, collection_id
from cacheblend_store.format.layouts import CODECS, blob_spec
from cacheblend_store.format.plain_json import load_object
from cacheblend_store.format.records import ChunkManifest, DocumentChunk, DocumentRecord

ARCHIVE_VERSIONS = (1, 2)  # 2: with chunks that have no KV
MAX_LINE_BYTES = 12 << 20
CONTEXTS = ("prefix", "sink", "document", "neighbours")


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


def first_line(*, whole: bool = True) -> dict[str, Any]:
    """whole: every chunk has KV, which is what the first version of archives holds."""
    version = ARCHIVE_VERSIONS[0 if whole else 1]
    return {"type": "cacheblend-export", "version": version, "store_format": FORMAT_VERSION}


def last_line(collections: int, chunks: int, documents: int) -> dict[str, Any]:
    return {"type": "end", "collections": collections, "chunks": chunks, "documents": documents}


def encode_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode("ascii") + b"\n"


def decode_line(line: bytes, number: int) -> dict[str, Any]:
    """Raises ArchiveError when it is no JSON object."""
    try:
        return load_object(line.decode("ascii"), MAX_LINE_BYTES)
    except ValueError as error:
        raise ArchiveError(
            f"line {number} of the manifest is no record: {error}"[:200], "the archive is damaged: get it again"
        ) from error


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


def chunk_record(line: ChunkLine) -> dict[str, Any]:
    skip = ("key", "blob_sizes", "blob_digests", "left_context_keys")
    facts = {name: value for name, value in vars(line.manifest).items() if name not in skip}
    keys = [key.hex() for key in line.manifest.left_context_keys]
    head = {"type": "chunk", "id": line.manifest.id, "sha256": line.sha256, "bytes": line.size}
    return {**head, **facts, "left_context_keys": keys}


def parse_chunk(record: Mapping[str, Any]) -> ChunkLine:
    """Raises ArchiveError unless every field is there, of its type and in its range, and the size what they imply."""
    fields = _Fields(record, f"chunk {str(record.get('id'))[:12]}")
    manifest = ChunkManifest(
        key=fields.key("id"),
        token_ids=fields.ids("token_ids"),
        left_context_ids=fields.ids("left_context_ids"),
        context=fields.one_of("context", CONTEXTS),
        codec=fields.one_of("codec", CODECS),
        collected_len=fields.number("collected_len", 1, 1 << 31),
        index=fields.number("index", 0, 1 << 31),
        span=fields.span("span"),
        created=fields.moment("created"),
        left_context_keys=fields.keys("left_context_keys"),
        num_layers=fields.number("num_layers", 1, 1024),
        num_kv_heads=fields.number("num_kv_heads", 1, 4096),
        head_dim=fields.number("head_dim", 1, 65536),
        text=fields.text("text"),
        source=fields.text("source"),
        model=fields.text("model"),
        model_name=fields.text("model_name"),
        tokenizer=fields.text("tokenizer"),
        collection=fields.text("collection"),
        prefix_digest=fields.text("prefix_digest"),
        salt_digest=fields.text("salt_digest"),
    )
    fields.done("type", "sha256", "bytes")
    if not manifest.token_ids or (manifest.codec == "int4" and manifest.head_dim % 2):
        raise ArchiveError(f"chunk {manifest.id[:12]} is of a shape that no chunk has")
    size = fields.number("bytes", 0, 1 << 60)
    line = ChunkLine(manifest, size, fields.hex("sha256", 64 if size else 0))
    if line.size and line.size != len(chunk_header(manifest)) + num_data_bytes(manifest):
        raise ArchiveError(f"chunk {manifest.id[:12]} has {line.size:,} bytes, and its shape implies another number")
    return line


def layer_spec(manifest: ChunkManifest) -> BlobSpec:
    return blob_spec(manifest.codec, manifest.num_tokens, manifest.num_kv_heads, manifest.head_dim)


def chunk_header(manifest: ChunkManifest) -> bytes:
    """What a chunk's safetensors file begins with: tensors layers.0.k, layers.0.v, ... in order."""
    layer, whole = layer_spec(manifest), dict[str, TensorSpec]()
    for number in range(manifest.num_layers):
        whole.update({f"layers.{number}.{name}": tensor for name, tensor in layer.items()})
    return blob_prefix(whole)


def num_data_bytes(manifest: ChunkManifest) -> int:
    return manifest.num_layers * sum(tensor.num_bytes for tensor in layer_spec(manifest).values())


# collections and documents


def collection_record(line: CollectionLine) -> dict[str, Any]:
    return {
        "type": "collection", "id": line.id, "model": line.parts.model, "tokenizer": line.parts.tokenizer,
        "codec": line.parts.codec, "prefix_ids": line.prefix_ids, "salted": line.salted,
    }  # fmt: skip


def parse_collection(record: Mapping[str, Any], salt: str) -> CollectionLine:
    """salt: of this import. Raises ArchiveError when the id is not the digest of the rest."""
    fields = _Fields(record, f"collection {str(record.get('id'))[:12]}")
    prefix = None if record.get("prefix_ids") is None else fields.ids("prefix_ids")
    salted = fields.one_of("salted", (True, False))
    parts = KeyParts(
        fields.text("model"),
        fields.text("tokenizer"),
        prefix or (),
        (),
        fields.one_of("codec", CODECS),
        salt if salted else "",
    )
    line = CollectionLine(fields.text("id"), parts, prefix, salted)
    fields.done("type", "prefix_ids")
    if salted and not salt:
        raise ArchiveError("chunks of the archive were stored with a salt", "give the same --salt")
    if prefix is not None and collection_id(parts) != line.id:
        hint = "give the --salt they were stored with" if salted else "the archive was changed: do not use it"
        raise ArchiveError(f"the id of collection {line.id[:12]!r} is not the digest of what it names", hint)
    return line


def document_record(document: DocumentRecord) -> dict[str, Any]:
    chunks = [[c.key.hex(), c.index, c.start, c.end] for c in document.chunks]
    return {"type": "document", **vars(document), "chunks": chunks}


def parse_document(record: Mapping[str, Any]) -> DocumentRecord:
    """Raises ArchiveError."""
    fields = _Fields(record, f"document {str(record.get('source'))[:40]!r}")
    chunks, settings = record.get("chunks"), record.get("settings")
    if not isinstance(chunks, list):
        raise fields.wrong("chunks")
    if not isinstance(settings, dict) or not all(_is_plain(value) for value in settings.values()):
        raise fields.wrong("settings")
    places = []
    for place in chunks:
        if not isinstance(place, list) or len(place) != 4 or not all(_is_count(n, 1 << 40) for n in place[1:]):
            raise fields.wrong("chunks")
        places.append(DocumentChunk(fields.as_key(place[0], "chunks"), *place[1:]))
    document = DocumentRecord(
        fields.text("source"), fields.text("collection"), fields.text("content_digest"), tuple(places),
        fields.moment("updated"), settings,
        fields.one_of("context", CONTEXTS[1:]) if "context" in record else "sink",
    )  # fmt: skip
    fields.done("type", "chunks", "settings")
    return document


class _Fields:
    """Fields of one record, each asked for by its type. `done` refuses what nobody asked for."""

    def __init__(self, record: Mapping[str, Any], what: str) -> None:
        self._record, self._what, self._seen = record, what, set[str]()

    def wrong(self, name: str) -> ArchiveError:
        return ArchiveError(f"the manifest's record of {self._what} has no proper {name}", "the archive is damaged")

    def _take(self, name: str) -> Any:
        self._seen.add(name)
        return self._record.get(name)

    def text(self, name: str) -> str:
        value = self._take(name)
        if not isinstance(value, str):
            raise self.wrong(name)
        return value

    def number(self, name: str, least: int, most: int) -> int:
        value = self._take(name)
        if not _is_count(value, most) or value < least:
            raise self.wrong(name)
        return int(value)

    def moment(self, name: str) -> float:
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e11:
            raise self.wrong(name)
        return float(value)

    def one_of(self, name: str, known: tuple[Any, ...]) -> Any:
        value = self._take(name)
        if type(value) is not type(known[0]) or value not in known:
            raise self.wrong(name)
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self._take(name)
        if not isinstance(value, list) or not all(_is_count(i, (1 << 32) - 1) for i in value):
            raise self.wrong(name)
        return tuple(value)

    def span(self, name: str) -> tuple[int, int]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) != 2 or not all(_is_count(i, 1 << 40) for i in value):
            raise self.wrong(name)
        return value[0], value[1]

    def hex(self, name: str, digits: int) -> str:
        return self._hex(self._take(name), name, digits)

    def _hex(self, value: Any, name: str, digits: int) -> str:
        if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
            raise self.wrong(name)
        return value

    def key(self, name: str) -> bytes:
        return self.as_key(self._take(name), name)

    def as_key(self, value: Any, name: str) -> bytes:
        """A value that is in the field `name`."""
        return bytes.fromhex(self._hex(value, name, 2 * KEY_BYTES))

    def keys(self, name: str) -> tuple[bytes, ...]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self.wrong(name)
        return tuple(self.as_key(text, name) for text in value)

    def done(self, *others: str) -> None:
        extra = set(self._record) - self._seen - set(others)
        if extra:
            raise ArchiveError(f"the manifest's record of {self._what} has an unknown field {sorted(extra)[0][:40]!r}")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
