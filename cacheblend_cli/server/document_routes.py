"""Document routes: put (JSON or the bytes of a file), list, read, delete."""

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
from cacheblend_cli.server import document_json
from cacheblend_cli.server.api_errors import ApiError, bad_request
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
from cacheblend_cli.server.openai.protocol import PutBody, parse
from cacheblend_cli.server.server_state import ServerState

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
    """List the tenant's documents, and the file types that can be put."""
    data = await state.in_pool(lambda: document_json.list_documents(state.engine, state.store, tenant_of(request)))
    return JSONResponse({"object": "list", "data": data, "suffixes": readable_suffixes(), "max_bytes": state.max_body})


async def read_document(request: Request, state: ServerState) -> Response:
    def read(document_id: str) -> dict[str, Any] | None:
        return document_json.read_document(state.engine, state.store, tenant_of(request), document_id)

    return JSONResponse(await _found(request, state, read))


async def delete_document(request: Request, state: ServerState) -> Response:
    def delete(document_id: str) -> dict[str, Any] | None:
        deleted = document_json.delete_document(state.store, tenant_of(request), document_id)
        return {"id": document_id, "object": "document.deleted", "deleted": True} if deleted else None

    return JSONResponse(await _found(request, state, delete))


async def _found(request: Request, state: ServerState, work: Callable[[str], dict[str, Any] | None]) -> dict[str, Any]:
    """Return the work's result. Raises ApiError 404 if it is None."""
    document_id = request.path_params["id"]
    result = await state.in_pool(lambda: work(document_id))
    if result is None:
        raise ApiError(404, f"no such document: {document_id[:80]!r}", code="document_not_found")
    return result
