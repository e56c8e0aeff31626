"""What is found in the store for a query, as it is told on the wire."""

from __future__ import annotations

from typing import Any

from cacheblend_cli.corpus.search import how_of, search
from cacheblend_cli.runtime.request import chunk_of
from cacheblend_cli.runtime.runtime import Runtime
from cacheblend_cli.server.documents import public_id, public_title
from cacheblend_cli.server.host import Host
from cacheblend_cli.server.tenants import Tenant


def find(runtime: Runtime, host: Host, query: str, k: int, tenant: Tenant) -> list[dict[str, Any]]:
    """The best chunks of the tenant's, in the engine's thread."""
    runtime.take_date(host.store, tenant.salt)
    collections = [collection.id for collection in runtime.collections(tenant.salt)]
    hits = search(host.store, query, k, collections, how=how_of(host.settings))
    found = []
    for hit in hits:
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
