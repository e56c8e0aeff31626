"""Records: chunk manifests, document records and memos, encoded as bytes with a digest."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeVar

import xxhash
from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

from cacheblend_store.errors import BadBlob, StoreError
from cacheblend_store.format.blobs import PLAIN, BlobSpec, blob_spec, state_spec
from cacheblend_store.format.keys import KEY_BYTES, blob_key, pack_ids, unpack_ids
from cacheblend_store.format.plain_json import Count, Moment, Size, TokenIds, dump_object, load_object, typed

T = TypeVar("T")
R = TypeVar("R")
Blob = bytes | bytearray | memoryview
DIGEST_BYTES = 16
MAX_MANIFEST_BYTES = 8 << 20  # about 800,000 tokens
MAX_DOCUMENT_BYTES = 256 << 20
MAX_MEMO_BYTES = 64 << 20
MEMO_KEYS = b"memo\0"
COLLECTION = "collection"
"""Kind of the memos that describe collections. Their name is the collection id. They are uploaded to a tier with the
chunks."""
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


@dataclass(frozen=True)
class ChunkManifest:
    """A stored chunk, with one blob per layer, and one with the state of recurrent layers.

    A chunk has no KV if it was evicted or is not computed yet. Then no blobs are stored, blob_sizes are 0, and
    blob_digests are those of the evicted KV, or zeros. Text, tokens and places stay known, and the KV is computed when
    it is needed.
    """

    key: Key
    token_ids: TokenIds
    text: str
    model: str  # fingerprint
    model_name: str
    tokenizer: str  # fingerprint
    collection: str  # id
    context: str  # "prefix", "sink", "document" or "neighbours"
    left_context_ids: TokenIds  # tokens between the prefix and the chunk
    collected_len: Count  # length of the sequence in which the chunk was prefilled
    codec: str
    num_layers: Size  # layers with their own KV
    num_kv_heads: Size
    head_dim: Size
    source: str  # first document with this chunk
    index: Count  # of the chunk in that document
    span: tuple[Count, Count]  # character range in that document
    created: Moment  # seconds since the epoch
    blob_sizes: tuple[Count, ...] = ()  # bytes per layer
    blob_digests: tuple[Digest, ...] = ()  # per layer, see `blob_digest`
    layer_shapes: tuple[tuple[Size, Size], ...] = ()  # (KV heads, head_dim) per layer; empty if all are the same
    # head_dim of V if it differs from K's, else 0. With latent attention, V is the latent and K the position key.
    v_head_dim: Count = 0
    # Dtype, as named by safetensors, and shape of each tensor of the state that recurrent layers have after the chunk:
    # one blob more, behind those of the layers. Empty without such layers, and for a chunk whose state is not stored.
    state: tuple[tuple[str, tuple[Size, ...]], ...] = ()

    @property
    def num_blobs(self) -> int:
        return self.num_layers + bool(self.state)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """(KV heads, head_dim) of each layer, plus the head_dim of V if it differs."""
        of_v = (self.v_head_dim,) if self.v_head_dim else ()
        return self.layer_shapes or ((self.num_kv_heads, self.head_dim, *of_v),) * self.num_layers

    @property
    def id(self) -> str:
        return self.key.hex()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        return sum(self.blob_sizes)

    @property
    def has_kv(self) -> bool:
        return any(self.blob_sizes)

    @property
    def evicted(self) -> bool:
        """Return whether the chunk had KV that was evicted."""
        return not self.has_kv and any(map(any, self.blob_digests))

    def without_kv(self) -> ChunkManifest:
        digests = self.blob_digests or (bytes(DIGEST_BYTES),) * self.num_blobs
        return replace(self, blob_sizes=(0,) * self.num_blobs, blob_digests=digests)

    def is_of_model(self, model: str) -> bool:
        """Return whether `model` is the model's name, or a prefix of its fingerprint with at least four digits."""
        return self.model_name == model or (len(model) >= 4 and self.model.startswith(model))


class Locator(NamedTuple):
    """Place of a chunk in its file."""

    part: str = ""  # "page 3", "pages 3-5", "sheet Budget"; "" for files without parts
    lines: tuple[Count, Count] = (0, 0)  # first and last, from 1; (0, 0) for files without lines
    headings: tuple[str, ...] = ()  # titles above the chunk, outermost first

    @property
    def text(self) -> str:
        """Readable form: "page 3", "lines 10-42", or "" if unknown."""
        first, last = self.lines
        lines = "" if not first else f"line {first}" if first == last else f"lines {first}-{last}"
        return ", ".join(filter(None, (self.part, lines)))


NOWHERE = Locator()


class DocumentChunk(NamedTuple):
    """One chunk of a document: key, index, character range start:end, and place in the file."""

    key: Key
    index: Count  # type: ignore[assignment]  # in the place of a tuple's method
    start: Count
    end: Count
    locator: Locator = NOWHERE


@dataclass(frozen=True)
class DocumentRecord:
    """A document as last precomputed into a collection, in one context."""

    source: str
    collection: str  # id
    content_digest: str
    chunks: tuple[DocumentChunk, ...]
    updated: Moment  # seconds since the epoch
    settings: Mapping[str, Any] = field(default_factory=dict)  # determine the chunks and their left contexts
    context: str = "sink"  # see ChunkManifest

    @property
    def place(self) -> tuple[str, str, str]:
        """Identity of the record: collection, source, context."""
        return self.collection, self.source, self.context

    @property
    def key(self) -> bytes:
        return document_key(*self.place)


@dataclass(frozen=True)
class Memo:
    """A small record that the store keeps for its users without interpreting it. Unique by kind and name."""

    kind: str
    name: str
    value: Mapping[str, Any]  # JSON object
    updated: Moment  # seconds since the epoch

    @property
    def key(self) -> bytes:
        return memo_key(self.kind, self.name)


def layer_spec(manifest: ChunkManifest, layer: int) -> BlobSpec:
    """Return the tensors of a layer; behind the last layer, those of the state."""
    if layer == manifest.num_layers:
        return state_spec(manifest.state)
    return blob_spec(manifest.codec, manifest.num_tokens, *manifest.shapes[layer])


_OPTIONAL = ("layer_shapes", "v_head_dim", "state")  # left out of a record if they are empty


def encode_manifest(manifest: ChunkManifest) -> bytes:
    packed = {name: pack_ids(getattr(manifest, name)) for name in ("token_ids", "left_context_ids")}
    fields = {name: value for name, value in vars(manifest).items() if value or name not in _OPTIONAL}
    record = seal_json(manifest.key, {**fields, **packed})
    if len(record) > MAX_MANIFEST_BYTES:
        raise StoreError(f"chunk {manifest.id[:12]} is too long: {manifest.num_tokens:,} tokens", "cut smaller chunks")
    return record


def decode_manifest(key: bytes, value: bytes | memoryview) -> ChunkManifest:
    """Return the manifest. Raises BadBlob if the record is damaged or belongs to another key."""
    name = f"manifest of chunk {key.hex()[:12]}"
    with readable(name):
        data = load_object(unseal(key, value), MAX_MANIFEST_BYTES)
        for ids in ("token_ids", "left_context_ids"):
            data[ids] = unpack_ids(base64.b64decode(data[ids]))
        manifest = typed({**data, "key": key}, ChunkManifest)
    if not len(manifest.blob_sizes) == len(manifest.blob_digests) == manifest.num_blobs:
        raise BadBlob(f"{name} does not have one blob per layer")
    if not {dtype for dtype, _ in manifest.state} <= {*PLAIN.values()}:
        raise BadBlob(f"{name} has a state of an unknown dtype")
    if len(manifest.shapes) != manifest.num_layers:
        raise BadBlob(f"{name} does not have one shape per layer")
    if manifest.has_kv and not all(manifest.blob_sizes):
        raise BadBlob(f"{name} has KV for only some of its layers")
    return manifest


class _Outline(Struct):
    """The part of an encoded manifest that tells whether it has KV."""

    blob_sizes: list[int]


_decoder = Decoder(_Outline)


def has_blobs(key: bytes, value: bytes) -> bool:
    """Return whether an encoded manifest says that the chunk has KV. It is decoded only partially. False if the record
    is damaged."""
    with suppress(BadBlob, DecodeError, ValueError):
        return any(_decoder.decode(unseal(key, value)).blob_sizes)
    return False


def undamaged(decode: Callable[[bytes, T], R], key: bytes, value: T | None) -> R | None:
    """Return a decoded record, None if it is missing (value None) or damaged."""
    with suppress(BadBlob):
        return None if value is None else decode(key, value)
    return None


def encode_document(record: DocumentRecord) -> bytes:
    return seal_json(record.key, vars(record))


def decode_document(key: bytes, value: bytes | memoryview) -> DocumentRecord:
    """Return the document record. Raises BadBlob if it is damaged."""
    with readable(f"document record {key.hex()[:12]}"):
        return typed(load_object(unseal(key, value), MAX_DOCUMENT_BYTES), DocumentRecord)


def document_key(collection: str, source: str, context: str = "sink") -> bytes:
    """Return the key of a document record: a digest, because sources can be longer than LMDB allows for keys."""
    return xxhash.xxh3_128_digest(f"{collection}\0{source}\0{context}".encode("utf-8", "surrogatepass"))


def encode_memo(memo: Memo) -> bytes:
    return seal_json(memo.key, vars(memo))


def decode_memo(key: bytes, value: bytes | memoryview) -> Memo:
    """Return the memo. Raises BadBlob if it is damaged."""
    with readable(f"memo {key.hex()[-12:]}"):
        return typed(load_object(unseal(key, value), MAX_MEMO_BYTES), Memo)


def memo_key(kind: str, name: str) -> bytes:
    return MEMO_KEYS + xxhash.xxh3_128_digest(f"{kind}\0{name}".encode("utf-8", "surrogatepass"))


def with_digests(manifest: ChunkManifest, blobs: Sequence[Blob]) -> ChunkManifest:
    """Return the manifest with the sizes and digests of its blobs."""
    assert len(blobs) == manifest.num_blobs
    digests = tuple(blob_digest(manifest.key, i, manifest.num_tokens, blob) for i, blob in enumerate(blobs))
    return replace(manifest, blob_sizes=tuple(memoryview(blob).nbytes for blob in blobs), blob_digests=digests)


def blob_digest(key: bytes, layer: int, num_tokens: int, blob: Blob) -> bytes:
    """Return the xxh3-128 digest of a blob, bound to its chunk, layer and token count."""
    digest = blob_hasher(key, layer, num_tokens)
    digest.update(blob)
    return digest.digest()


def blob_hasher(key: bytes, layer: int, num_tokens: int) -> Any:
    """Return an xxhash object to compute `blob_digest` incrementally: update it with the bytes of the blob."""
    return xxhash.xxh3_128(blob_seed(blob_key(key, layer), num_tokens))


def blob_seed(key: bytes, num_tokens: int) -> bytes:
    """Return what is digested before the bytes of the blob with this `blob_key`."""
    return key + num_tokens.to_bytes(4, "big")


def use_record(key: bytes, moment: float) -> bytes:
    """Return the record of a chunk's last use, in seconds since the epoch."""
    return seal(key, struct.pack("<d", moment))


def used_at(key: bytes, value: bytes | memoryview) -> float:
    """Return the last use in seconds since the epoch, 0 if the record is damaged."""
    try:
        return struct.unpack("<d", unseal(key, value))[0]
    except (BadBlob, struct.error):
        return 0.0


def seal(key: bytes, payload: bytes) -> bytes:
    """Return the payload with a digest in front that binds it to its key."""
    return xxhash.xxh3_128_digest(key + payload) + payload


def seal_json(key: bytes, record: Mapping[str, Any]) -> bytes:
    """Return the record as sealed JSON, with bytes encoded as base64."""
    return seal(key, dump_object(record))


def unseal(key: bytes, value: bytes | memoryview) -> bytes:
    """Return the payload. Raises BadBlob if the digest does not match."""
    digest, payload = bytes(value[:DIGEST_BYTES]), bytes(value[DIGEST_BYTES:])
    if xxhash.xxh3_128_digest(key + payload) != digest:
        raise BadBlob(f"record {key.hex()[:12]} does not match its digest")
    return payload


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Convert decoding errors of a record to BadBlob."""
    try:
        yield
    except (ValueError, DecodeError, KeyError, TypeError, struct.error) as error:
        raise BadBlob(f"{name} cannot be decoded: {error}") from error
