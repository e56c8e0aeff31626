"""Documents that come over the wire: cut as `precompute` cuts, found by their content, kept under names of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore, DocumentRecord

from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.collect.document_records import document_record, is_news
from cacheblend_cli.collect.plan import Planned, plan_documents
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.chunker import iter_cut
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.corpus.places import PUT, SENT
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.engine.request import chunk_of
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.dates import keep_date
from cacheblend_cli.prompt.kept import keep_wording
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.settings import Settings, of_settings

if TYPE_CHECKING:
    from cacheblend_cli.server.state import ServerState

_SLICE = 8  # chunks that are collected before others are asked again


def document_of(name: str, text: str, title: str | None) -> Document:
    """As `read_documents` makes one of a file: line ends are "\\n", and the text ends with one. The title is its heading.

    Raises UsageError for a text without any word.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UsageError("the text of a document is empty", "leave the document out")
    if title and title.strip() and not text.lstrip("# ").startswith(title.strip()):
        text = f"# {title.strip()}\n\n{text}"
    return Document(name, text if text.endswith("\n") else text + "\n")


def sent(text: str, title: str | None, tenant: Tenant) -> Document:
    """A document that came with a question: known by what it says."""
    document = document_of("", text, title)
    return Document(f"{SENT}{tenant.name}/{document.digest}", document.text)


def put_name(tenant: Tenant, document_id: str) -> str:
    """The name in the store of a document that was put."""
    return f"{PUT}{tenant.name}/{document_id}"


def plan(collection: Collection, documents: Sequence[Document], settings: Settings) -> Planned:
    """The documents' chunks with their keys. Chunks are as large as the settings say, or as the model's context holds."""
    how = of_settings(CollectSettings, settings)
    room = max(1, (collection.model.spec.max_context - len(collection.prefix_ids)) // 2)
    encode = collection.model.tokenizer.encode_text
    cuts = [(document, list(iter_cut(document.text, encode, min(how.chunk_tokens, room)))) for document in documents]
    return plan_documents(collection, cuts, how)


def note_texts(collection: Collection, store: ChunkStore, planned: Sequence[PlannedChunk]) -> None:
    """Store what chunks say that are not there. Their KV is computed where they are first asked for, and stored then."""
    missing = {p.key: p for p in planned if not store.has_chunk(p.key)}
    Collector(collection, store).store_texts(list(missing.values()))


class Putting:
    """A document on its way into the store: its record first, then the KV that is missing, a few chunks at a time."""

    def __init__(self, runtime: Runtime, store: ChunkStore, document: Document, settings: Settings, salt: str) -> None:
        """In the engine's thread, as `collect` is."""
        collection = runtime.collection(salt, day=runtime.day(store, salt))
        [(_, self.chunks)] = plan(collection, [document], settings)
        record = document_record(collection, document, self.chunks, of_settings(CollectSettings, settings))
        self.is_new = (old := store.get_document(*record.place)) is None
        if is_news(record, old):
            store.put_documents([record])
        keep_date(store, collection)
        keep_wording(store, collection)
        note_texts(collection, store, self.chunks)
        wanted = {p.key: p for p in self.chunks if not store.has_kv(p.key)}
        self.missing = list(wanted.values())
        self._collector = Collector(collection, store, {p.key for p in self.chunks} | {collection.prefix_key})
        self._todo = [self.missing[i : i + _SLICE] for i in range(0, len(self.missing), _SLICE)]

    def collect(self, _: Runtime) -> bool:
        """Collect the next few chunks; whether more are to come."""
        if self._todo:
            self._collector.store_prefix()
            for _committed in self._collector.store(self._todo.pop(0)):
                pass
        return bool(self._todo)


def listed(runtime: Runtime, store: ChunkStore, tenant: Tenant) -> Iterator[dict[str, Any]]:
    """What the tenant can search, as it is told on the wire: what it put, and what was precomputed with its salt."""
    day = runtime.day(store, tenant.salt)
    own = {collection.id for collection in runtime.collections(tenant.salt, day=day)}
    latest: dict[str, DocumentRecord] = {}
    for record in store.documents():
        known = latest.get(record.source)
        if record.collection in own and (known is None or known.updated < record.updated):
            latest[record.source] = record
    for name, record in sorted(latest.items()):
        yield {
            "id": public_id(name),
            "object": "document" if name.startswith(PUT) else "file",
            "title": public_title(name),
            "chunks": list(dict.fromkeys(chunk.key.hex() for chunk in record.chunks)),
            "updated": int(record.updated),
        }


def delete(store: ChunkStore, tenant: Tenant, document_id: str) -> bool:
    """Forget a document that was put, and the chunks only it has; whether it was there."""
    name = put_name(tenant, document_id)
    records = [record for record in store.documents() if record.source == name]
    store.put_documents((), [record.key for record in records])
    return bool(records)


def public_id(name: str) -> str:
    """What a document is called on the wire: its id, or where it is a file one made of its path, which is not told."""
    if name.startswith((PUT, SENT)):
        return name.split("/", 2)[2]
    return "file-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def public_title(name: str) -> str:
    """The id, or a file's name without its folders."""
    return public_id(name) if name.startswith((PUT, SENT)) else PurePosixPath(name).name


def find(runtime: Runtime, host: ServerState, query: str, k: int, tenant: Tenant) -> list[dict[str, Any]]:
    """The best chunks of the tenant's, as they are told on the wire; in the engine's thread."""
    day = runtime.day(host.store, tenant.salt)
    collections = [collection.id for collection in runtime.collections(tenant.salt, day=day)]
    found = []
    for hit in search(host.store, query, Lookup.of(replace(host.settings, top_k=k)), collections):
        manifest = chunk_of(host.store, hit.key)
        found.append(
            {
                "id": hit.id,
                "document": public_id(hit.source),
                "title": public_title(hit.source),
                "index": hit.index,
                "score": round(hit.score, 4),
                "snippet": hit.snippet,
                "text": manifest.text if manifest else "",
            }
        )
    return found
