"""Documents sent over HTTP: cut as `precompute` cuts, recognised by their content, stored under names of their own."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore, DocumentRecord, StoreError

from cacheblend_cli.collect.collector import Collector
from cacheblend_cli.collect.document_records import document_record, is_news
from cacheblend_cli.collect.plan import Planned, plan_documents
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.citations import TITLE, Citations
from cacheblend_cli.corpus.cutting import Cut, cut_document
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

logger = logging.getLogger("cacheblend")


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
    cut = Cut(min(how.chunk_tokens, room))
    cuts = [(document, list(cut_document(document, encode, cut))) for document in documents]
    return plan_documents(collection, cuts, how)


class Putting:
    """A document on its way into the store: planned, its missing KV collected one launch at a time, then committed. It is listed
    and searched once it is there whole, in place of what was stored under its name."""

    def __init__(
        self, runtime: Runtime, store: ChunkStore, document: Document, settings: Settings, salt: str, title: str = ""
    ) -> None:
        """Cut the document. Any thread. title: what the document is called in lists, "" for its id.

        num_stored: chunks whose KV is in the store. settled: committed or undone.
        """
        collection = runtime.collection(salt, day=runtime.day(store, salt))
        [(_, self.chunks)] = plan(collection, [document], settings)
        record = document_record(collection, document, self.chunks, of_settings(CollectSettings, settings))
        self._record = replace(record, settings={**record.settings, TITLE: title}) if title else record
        self._store, self._old = store, store.get_document(*record.place)
        self._new = {p.key for p in self.chunks if not store.has_chunk(p.key)}
        wanted = {p.key: p for p in self.chunks if not store.has_kv(p.key)}
        self.missing = list(wanted.values())
        self._collector = Collector(collection, store, {p.key for p in self.chunks} | {collection.prefix_key})
        self._launches = self._collect()
        self.num_stored = len(self.chunks) - len(self.missing)
        self.settled = False

    @property
    def is_new(self) -> bool:
        """Whether nothing was stored under the document's name."""
        return self._old is None

    def collect(self, _: Runtime) -> bool:
        """Do the next launch, in the engine's thread. Returns whether there are more."""
        return next(self._launches, False)

    def _collect(self) -> Iterator[bool]:
        if self.missing:
            self._collector.store_prefix()
            yield True
            for _ in self._collector.store(self.missing):
                self.num_stored += 1
                yield True

    def commit(self) -> None:
        """List the document. Any thread; call it once `collect` has returned False."""
        keep_date(self._store, self._collector.collection)
        keep_wording(self._store, self._collector.collection)
        self._collector.store_texts([p for p in self.chunks if not self._store.has_chunk(p.key)])
        if is_news(self._record, self._old):
            self._store.put_documents([self._record])
        self.settled = True

    def undo(self) -> None:
        """Remove what was stored of a document that is not committed. What cannot be removed is logged."""
        self.settled = True
        try:
            with self._store.read() as reader:
                loose = [key for key in self._new if not any(reader.documents_of(key))]
            self._store.remove_chunks(loose)
        except StoreError as error:
            logger.error("chunks of a document that was refused stay in the store: %s", error.message)


def visible(runtime: Runtime, store: ChunkStore, tenant: Tenant) -> dict[str, DocumentRecord]:
    """The latest records of the tenant's documents, by name: those it put, and those precomputed with its salt."""
    day = runtime.day(store, tenant.salt)
    own = {collection.id for collection in runtime.collections(tenant.salt, day=day)}
    latest: dict[str, DocumentRecord] = {}
    for record in store.documents():
        known = latest.get(record.source)
        if record.collection in own and (known is None or known.updated < record.updated):
            latest[record.source] = record
    return latest


def listed(runtime: Runtime, store: ChunkStore, tenant: Tenant) -> list[dict[str, Any]]:
    """The tenant's documents in their JSON form, by name."""
    return [
        {
            **_described(record),
            "chunks": list(dict.fromkeys(chunk.key.hex() for chunk in record.chunks)),
            "updated": int(record.updated),
        }
        for _, record in sorted(visible(runtime, store, tenant).items())
    ]


def read(runtime: Runtime, store: ChunkStore, tenant: Tenant, document_id: str) -> dict[str, Any] | None:
    """A document's chunks in order, with their texts and places. None for an id that is not among the tenant's documents."""
    records = visible(runtime, store, tenant).items()
    record = next((record for name, record in records if public_id(name) == document_id), None)
    if record is None:
        return None
    manifests = {chunk.key: chunk_of(store, chunk.key) for chunk in record.chunks}
    chunks = [
        {
            "id": chunk.key.hex(),
            "index": chunk.index,
            "place": chunk.locator.text,
            "headings": chunk.locator.headings,
            "text": manifest.text if (manifest := manifests[chunk.key]) else "",
        }
        for chunk in record.chunks
    ]
    return {**_described(record), "chunks": chunks}


def _described(record: DocumentRecord) -> dict[str, Any]:
    name = record.source
    return {
        "id": public_id(name),
        "object": "document" if name.startswith(PUT) else "file",
        "title": record.settings.get(TITLE) or public_title(name),
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


def find(host: ServerState, query: str, k: int, tenant: Tenant) -> list[dict[str, Any]]:
    """The tenant's best chunks for a query in their JSON form."""
    runtime, store = host.runtime, host.store
    day = runtime.day(store, tenant.salt)
    collections = [collection.id for collection in runtime.collections(tenant.salt, day=day)]
    found, citations = [], Citations(store)
    for hit in search(store, query, Lookup.of(replace(host.settings, top_k=k)), collections):
        manifest = chunk_of(store, hit.key)
        cited = [c for c in citations.all_of(manifest) if c.name == hit.source] if manifest else []
        found.append(
            {
                "id": hit.id,
                "document": public_id(hit.source),
                "title": next((c.title for c in cited if c.title), public_title(hit.source)),
                "place": next((c.locator.text for c in cited), ""),
                "index": hit.index,
                "score": round(hit.score, 4),
                "snippet": hit.snippet,
                "text": manifest.text if manifest else "",
            }
        )
    return found
