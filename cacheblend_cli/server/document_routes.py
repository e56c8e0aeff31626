"""Documents and stored chunks over HTTP: put (JSON or the bytes of a file), list, read, delete, search."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from cacheblend_store import DocumentRecord
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.collect.texts import Putting, document_of, put_name
from cacheblend_cli.corpus.citations import TITLE, Citations
from cacheblend_cli.corpus.converters import readable_suffixes
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.documents import Document, convert_bytes
from cacheblend_cli.corpus.places import PUT, SENT
from cacheblend_cli.corpus.scopes import ROOTS
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.errors import QueueFull
from cacheblend_cli.server.api_errors import ApiError, bad_request
from cacheblend_cli.server.document_paths import distinct_paths
from cacheblend_cli.server.http import (
    EVENTS,
    JSON,
    EventStream,
    encode_stream,
    json_body,
    media_type,
    raw_body,
    tenant_of,
)
from cacheblend_cli.server.openai.protocol import PutBody, SearchBody, parse
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.types import SearchParams

OFFICE = "application/vnd.openxmlformats-officedocument"
_SUFFIXES = {
    "application/octet-stream": "", "text/plain": ".txt", "text/markdown": ".md", "text/html": ".html", "text/csv": ".csv",
    "application/pdf": ".pdf", "application/epub+zip": ".epub", "message/rfc822": ".eml",
    f"{OFFICE}.wordprocessingml.document": ".docx", f"{OFFICE}.presentationml.presentation": ".pptx",
    f"{OFFICE}.spreadsheetml.sheet": ".xlsx",
}  # fmt: skip
"""Media type -> file suffix, which selects the converter; "": use the suffix of the document's id."""


async def put_document(request: Request, state: ServerState) -> Response:
    """Store a document and compute its KV. Clients that accept text/event-stream receive progress."""
    document_id = request.path_params["id"]
    if not document_id.strip() or len(document_id) > 256 or not document_id.isprintable():
        raise bad_request("a document id must have 1 to 256 printable characters", "id")
    tenant = tenant_of(request)
    name = put_name(tenant.name, document_id)
    if media_type(request) in _SUFFIXES:
        data, suffix = await raw_body(request), _SUFFIXES[media_type(request)]
        file_name = f"document{suffix}" if suffix else PurePosixPath(document_id).name
        async with state.converting:
            document = await state.in_pool(lambda: _convert(name, file_name, data))
        title = document.layout.title
    else:
        if media_type(request) != JSON:
            raise ApiError(415, f"the body must be {JSON} or one of {', '.join(_SUFFIXES)}")
        body = parse(PutBody, await json_body(request))
        document, title = document_of(name, body.text, body.title), (body.title or "").strip()
    putting = await state.in_pool(lambda: state.engine.put(state.store, document, tenant.salt, title))
    if EVENTS in request.headers.get("accept", ""):
        with ExitStack() as stack:
            stack.callback(_undo_later, state, putting)
            return EventStream(
                encode_stream(state, _progress(state, putting, document_id, title), EVENTS), stack.pop_all()
            )
    async for _ in _steps(state, putting):
        pass
    return JSONResponse(_put_record(putting, document_id, title), 201 if putting.is_new else 200)


def _convert(name: str, file_name: str, data: bytes) -> Document:
    """Convert a file. Raises ApiError: 415 if the file type is not supported here, 400 if the file cannot be read."""
    suffix = PurePosixPath(file_name).suffix.lower()
    try:
        return convert_bytes(name, file_name, data)
    except NoDocument as error:
        if error.unread:
            kinds = " ".join(readable_suffixes())
            what = f"file type {suffix or file_name!r} is not supported here; supported: {kinds}"
            raise ApiError(415, what, code="unsupported_document") from error
        raise bad_request(f"the file cannot be read: {error.reason}", code="unreadable_document") from error


async def _steps(state: ServerState, putting: Putting) -> AsyncIterator[int]:
    """Collect and commit, yielding the number of chunks stored so far. Removes them again on an error."""
    try:
        yield putting.num_stored
        while await state.in_engine(putting.collect):
            yield putting.num_stored
        await state.in_pool(putting.commit)
    except Exception:
        await run_in_threadpool(putting.undo)  # also when the server stops
        raise


async def _progress(
    state: ServerState, putting: Putting, document_id: str, title: str
) -> AsyncIterator[dict[str, Any]]:
    async for stored in _steps(state, putting):
        yield {"id": document_id, "object": "document.progress", "stored": stored, "chunks": len(putting.chunks)}
    yield _put_record(putting, document_id, title)


def _undo_later(state: ServerState, putting: Putting) -> None:
    """Undo an upload whose client disconnected, in the engine's thread, where a chunk may still be stored."""

    def undo() -> None:
        if not putting.settled:
            putting.undo()

    if not putting.settled:
        with suppress(QueueFull):  # the server stops
            state.engine.between_steps(undo)


def _put_record(putting: Putting, document_id: str, title: str) -> dict[str, Any]:
    missing = {p.key for p in putting.missing}
    chunks = [
        {"id": p.key.hex(), "tokens": len(p.chunk.token_ids), "status": "new" if p.key in missing else "unchanged"}
        for p in putting.chunks
    ]
    return {"id": document_id, "object": "document", "title": title or document_id, "chunks": chunks}


async def list_documents(request: Request, state: ServerState) -> Response:
    """List the tenant's documents, sorted by name, and the file types that can be put. Files of the store's own tenant
    that share a file name have a path."""

    def read() -> list[dict[str, Any]]:
        tenant = tenant_of(request)
        visible = _visible(state, tenant)
        roots = set() if tenant.name else {memo.name.partition("\0")[0] for memo in state.store.memos(ROOTS)}
        paths = distinct_paths(visible, roots)
        return [
            {
                **_document_fields(record),
                **({"path": paths[name]} if name in paths else {}),
                "chunks": list(dict.fromkeys(chunk.key.hex() for chunk in record.chunks)),
                "updated": int(record.updated),
            }
            for name, record in sorted(visible.items())
        ]

    data = await state.in_pool(read)
    return JSONResponse({"object": "list", "data": data, "suffixes": readable_suffixes(), "max_bytes": state.max_body})


async def read_document(request: Request, state: ServerState) -> Response:
    """Return a document with its chunks in order: text, place, headings."""
    document_id = request.path_params["id"]

    def read() -> dict[str, Any]:
        visible = _visible(state, tenant_of(request)).items()
        record = next((record for name, record in visible if public_id(name) == document_id), None)
        if record is None:
            raise _no_document(document_id)
        manifests = {chunk.key: state.store.undamaged(chunk.key) for chunk in record.chunks}
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

    return JSONResponse(await state.in_pool(read))


async def delete_document(request: Request, state: ServerState) -> Response:
    """Delete a document that was put, and chunks that only it has."""
    document_id = request.path_params["id"]

    def delete() -> None:
        name = put_name(tenant_of(request).name, document_id)
        records = [record for record in state.store.documents() if record.source == name]
        if not records:
            raise _no_document(document_id)
        state.store.put_documents((), [record.key for record in records])

    await state.in_pool(delete)
    return JSONResponse({"id": document_id, "object": "document.deleted", "deleted": True})


def _no_document(document_id: str) -> ApiError:
    return ApiError(404, f"no such document: {document_id[:80]!r}", code="document_not_found")


def _visible(state: ServerState, tenant: Tenant) -> dict[str, DocumentRecord]:
    """Return the latest record of each document of the tenant (put, or precomputed with its salt) by name."""
    own = set(state.engine.usable(state.store, tenant.salt))
    latest: dict[str, DocumentRecord] = {}
    for record in state.store.documents():
        known = latest.get(record.source)
        if record.collection in own and (known is None or known.updated < record.updated):
            latest[record.source] = record
    return latest


def _document_fields(record: DocumentRecord) -> dict[str, Any]:
    name = record.source
    kind, title = "document" if name.startswith(PUT) else "file", record.settings.get(TITLE) or public_title(name)
    return {"id": public_id(name), "object": kind, "title": title}


def public_id(name: str) -> str:
    """Return the public id of a document: its id, or for a file a digest of its private path."""
    if name.startswith((PUT, SENT)):
        return name.split("/", 2)[2]
    return "file-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def public_title(name: str) -> str:
    """Return the id, or the file name without its directories."""
    return public_id(name) if name.startswith((PUT, SENT)) else PurePosixPath(name).name


async def search_chunks(request: Request, state: ServerState) -> Response:
    """Return the tenant's best chunks for a query."""
    body = parse(SearchBody, await json_body(request))
    return JSONResponse(
        {"object": "list", "data": await state.in_pool(lambda: _search(state, body, tenant_of(request)))}
    )


def _search(state: ServerState, body: SearchBody, tenant: Tenant) -> list[dict[str, Any]]:
    found, citations = [], Citations(state.store)
    lookup = Lookup.with_weights(SearchParams.of(replace(state.settings, top_k=body.k)))
    for hit in search(state.store, body.query, lookup, state.engine.usable(state.store, tenant.salt)).hits:
        manifest = state.store.undamaged(hit.key)
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
