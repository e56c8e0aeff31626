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
from cacheblend_cli.corpus.search import Lookup
from cacheblend_cli.corpus.search import search as search_store
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.types import SearchParams

if TYPE_CHECKING:
    from cacheblend_cli.server.server_state import ServerState


def visible(engine: Engine, store: ChunkStore, tenant: Tenant) -> dict[str, DocumentRecord]:
    """Return the latest record of each document of the tenant (put, or precomputed with its salt) by name."""
    own = set(engine.usable(store, tenant.salt))
    latest: dict[str, DocumentRecord] = {}
    for record in store.documents():
        known = latest.get(record.source)
        if record.collection in own and (known is None or known.updated < record.updated):
            latest[record.source] = record
    return latest


def list_documents(engine: Engine, store: ChunkStore, tenant: Tenant) -> list[dict[str, Any]]:
    """Return the tenant's documents as JSON objects, sorted by name."""
    return [
        {
            **_document_fields(record),
            "chunks": list(dict.fromkeys(chunk.key.hex() for chunk in record.chunks)),
            "updated": int(record.updated),
        }
        for _, record in sorted(visible(engine, store, tenant).items())
    ]


def read_document(engine: Engine, store: ChunkStore, tenant: Tenant, document_id: str) -> dict[str, Any] | None:
    """Return a document with its chunks in order (text, place, headings), None if the tenant has no such document."""
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
    return {**_document_fields(record), "chunks": chunks}


def _document_fields(record: DocumentRecord) -> dict[str, Any]:
    name = record.source
    return {
        "id": public_id(name),
        "object": "document" if name.startswith(PUT) else "file",
        "title": record.settings.get(TITLE) or public_title(name),
    }


def delete_document(store: ChunkStore, tenant: Tenant, document_id: str) -> bool:
    """Delete a document that was put, and chunks that only it has. Return whether it existed."""
    name = put_name(tenant.name, document_id)
    records = [record for record in store.documents() if record.source == name]
    store.put_documents((), [record.key for record in records])
    return bool(records)


def public_id(name: str) -> str:
    """Return the public id of a document: its id, or for a file a digest of its private path."""
    if name.startswith((PUT, SENT)):
        return name.split("/", 2)[2]
    return "file-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def public_title(name: str) -> str:
    """Return the id, or the file name without its directories."""
    return public_id(name) if name.startswith((PUT, SENT)) else PurePosixPath(name).name


def search(state: ServerState, query: str, k: int, tenant: Tenant) -> list[dict[str, Any]]:
    """Return the tenant's best chunks for a query as JSON objects."""
    store, collections = state.store, state.engine.usable(state.store, tenant.salt)
    found, citations = [], Citations(store)
    lookup = Lookup.with_weights(SearchParams.of(replace(state.settings, top_k=k)))
    for hit in search_store(store, query, lookup, collections).hits:
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
