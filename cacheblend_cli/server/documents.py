"""Stored documents and chunks in their JSON form."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore, DocumentRecord

from cacheblend_cli.collect.texts import put_name
from cacheblend_cli.corpus.citations import TITLE, Citations
from cacheblend_cli.corpus.places import PUT, SENT
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.types import SearchParams

if TYPE_CHECKING:
    from cacheblend_cli.server.state import ServerState


def visible(engine: Engine, store: ChunkStore, tenant: Tenant) -> dict[str, DocumentRecord]:
    """The latest records of the tenant's documents, by name: those it put, and those precomputed with its salt."""
    own = set(engine.usable(store, tenant.salt))
    latest: dict[str, DocumentRecord] = {}
    for record in store.documents():
        known = latest.get(record.source)
        if record.collection in own and (known is None or known.updated < record.updated):
            latest[record.source] = record
    return latest


def listed(engine: Engine, store: ChunkStore, tenant: Tenant) -> list[dict[str, Any]]:
    """The tenant's documents in their JSON form, by name."""
    return [
        {
            **_described(record),
            "chunks": list(dict.fromkeys(chunk.key.hex() for chunk in record.chunks)),
            "updated": int(record.updated),
        }
        for _, record in sorted(visible(engine, store, tenant).items())
    ]


def read(engine: Engine, store: ChunkStore, tenant: Tenant, document_id: str) -> dict[str, Any] | None:
    """A document's chunks in order, with their texts and places. None for an id that is not among the tenant's
    documents."""
    records = visible(engine, store, tenant).items()
    record = next((record for name, record in records if public_id(name) == document_id), None)
    if record is None:
        return None
    manifests = {chunk.key: store.undamaged(chunk.key) for chunk in record.chunks}
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
    name = put_name(tenant.name, document_id)
    records = [record for record in store.documents() if record.source == name]
    store.put_documents((), [record.key for record in records])
    return bool(records)


def public_id(name: str) -> str:
    """Return a document's name on the wire: its id, or for a file a digest of its path, which stays private."""
    if name.startswith((PUT, SENT)):
        return name.split("/", 2)[2]
    return "file-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def public_title(name: str) -> str:
    """The id, or a file's name without its folders."""
    return public_id(name) if name.startswith((PUT, SENT)) else PurePosixPath(name).name


def find(host: ServerState, query: str, k: int, tenant: Tenant) -> list[dict[str, Any]]:
    """The tenant's best chunks for a query in their JSON form."""
    store, collections = host.store, host.engine.usable(host.store, tenant.salt)
    found, citations = [], Citations(store)
    for hit in search(store, query, Lookup.with_weights(SearchParams.of(replace(host.settings, top_k=k))), collections):
        manifest = store.undamaged(hit.key)
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
