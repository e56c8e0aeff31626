"""Routes of documents: put as JSON or as the bytes of a file, list, read, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import PurePosixPath
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.collect.texts import Putting, document_of, put_name
from cacheblend_cli.corpus.converters import readable_suffixes
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.documents import Document, convert_bytes
from cacheblend_cli.errors import QueueFull
from cacheblend_cli.server import documents
from cacheblend_cli.server.bodies import PutBody, parse
from cacheblend_cli.server.errors import ApiError, bad
from cacheblend_cli.server.http import EVENTS, JSON, EventStream, json_body, media_type, pieces, raw_body, tenant_of
from cacheblend_cli.server.state import ServerState

OFFICE = "application/vnd.openxmlformats-officedocument"
_SUFFIXES = {
    "application/octet-stream": "", "text/plain": ".txt", "text/markdown": ".md", "text/html": ".html", "text/csv": ".csv",
    "application/pdf": ".pdf", "application/epub+zip": ".epub", "message/rfc822": ".eml",
    f"{OFFICE}.wordprocessingml.document": ".docx", f"{OFFICE}.presentationml.presentation": ".pptx",
    f"{OFFICE}.spreadsheetml.sheet": ".xlsx",
}  # fmt: skip
"""Media types of files, with the suffix that names the converter; "" takes the document's id as the file's name."""


async def put_document(request: Request, host: ServerState) -> Response:
    """Store a document; its KV is computed at once. A client that accepts text/event-stream receives the progress."""
    document_id = request.path_params["id"]
    if not document_id.strip() or len(document_id) > 256 or not document_id.isprintable():
        raise bad("the id of a document is 1 to 256 printable characters", "id")
    tenant = tenant_of(request)
    name = put_name(tenant.name, document_id)
    if media_type(request) in _SUFFIXES:
        data, file_name, title = await raw_body(request), _file_name(document_id, media_type(request)), ""
        async with host.converting:
            document = await host.in_pool(lambda: _converted(name, file_name, data))
        title = document.layout.title
    else:
        if media_type(request) != JSON:
            raise ApiError(415, f"the body must be {JSON} or one of {', '.join(_SUFFIXES)}")
        body = parse(PutBody, await json_body(request))
        document, title = document_of(name, body.text, body.title), (body.title or "").strip()
    putting = await host.in_pool(lambda: host.engine.put(host.store, document, tenant.salt, title))
    if EVENTS in request.headers.get("accept", ""):
        with ExitStack() as stack:
            stack.callback(_undo_later, host, putting)
            return EventStream(pieces(host, _progress(host, putting, document_id, title), EVENTS), stack.pop_all())
    async for _ in _steps(host, putting):
        pass
    return JSONResponse(_put_record(putting, document_id, title), 201 if putting.is_new else 200)


def _file_name(document_id: str, media: str) -> str:
    suffix = _SUFFIXES[media]
    return f"document{suffix}" if suffix else PurePosixPath(document_id).name


def _converted(name: str, file_name: str, data: bytes) -> Document:
    """Raises ApiError: 415 for kinds of files that this server cannot convert, 400 for files that cannot be read."""
    suffix = PurePosixPath(file_name).suffix.lower()
    try:
        return convert_bytes(name, file_name, data)
    except NoDocument as no:
        if no.unread:
            kinds = " ".join(readable_suffixes())
            what = f"files of the kind {suffix or file_name!r} cannot be converted here; these can: {kinds}"
            raise ApiError(415, what, code="unsupported_document") from no
        raise bad(f"the file cannot be read: {no.reason}", code="unreadable_document") from no


async def _steps(host: ServerState, putting: Putting) -> AsyncIterator[int]:
    """Collect and commit: the number of chunks stored so far, again and again. What was stored is removed where it
    fails."""
    try:
        yield putting.num_stored
        while await host.in_engine(putting.collect):
            yield putting.num_stored
        await host.in_pool(putting.commit)
    except Exception:
        await run_in_threadpool(putting.undo)  # also when the server ends
        raise


async def _progress(host: ServerState, putting: Putting, document_id: str, title: str) -> AsyncIterator[dict[str, Any]]:
    async for stored in _steps(host, putting):
        yield {"id": document_id, "object": "document.progress", "stored": stored, "chunks": len(putting.chunks)}
    yield _put_record(putting, document_id, title)


def _undo_later(host: ServerState, putting: Putting) -> None:
    """Undo what a client has left, in the engine's thread: a launch that runs there may still store a chunk."""

    def undo() -> None:
        if not putting.settled:
            putting.undo()

    if not putting.settled:
        with suppress(QueueFull):  # the server ends
            host.engine.between_steps(undo)


def _put_record(putting: Putting, document_id: str, title: str) -> dict[str, Any]:
    missing = {p.key for p in putting.missing}
    chunks = [
        {"id": p.key.hex(), "tokens": len(p.chunk.token_ids), "status": "new" if p.key in missing else "unchanged"}
        for p in putting.chunks
    ]
    return {"id": document_id, "object": "document", "title": title or document_id, "chunks": chunks}


async def list_documents(request: Request, host: ServerState) -> Response:
    """The tenant's documents, and which files can be put."""
    data = await host.in_pool(lambda: documents.listed(host.engine, host.store, tenant_of(request)))
    return JSONResponse({"object": "list", "data": data, "suffixes": readable_suffixes(), "max_bytes": host.max_body})


async def read_document(request: Request, host: ServerState) -> Response:
    def read(document_id: str) -> dict[str, Any] | None:
        return documents.read(host.engine, host.store, tenant_of(request), document_id)

    return JSONResponse(await _found(request, host, read))


async def delete_document(request: Request, host: ServerState) -> Response:
    def delete(document_id: str) -> dict[str, Any] | None:
        deleted = documents.delete(host.store, tenant_of(request), document_id)
        return {"id": document_id, "object": "document.deleted", "deleted": True} if deleted else None

    return JSONResponse(await _found(request, host, delete))


async def _found(request: Request, host: ServerState, work: Callable[[str], dict[str, Any] | None]) -> dict[str, Any]:
    """The work's result. Raises ApiError 404 for None."""
    document_id = request.path_params["id"]
    result = await host.in_pool(lambda: work(document_id))
    if result is None:
        raise ApiError(404, f"no document {document_id[:80]!r}", code="document_not_found")
    return result
