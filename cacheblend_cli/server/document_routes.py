"""Documents and stored chunks over HTTP: put (JSON or the bytes of a file), list, read, delete, search."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from cacheblend_documents.converted import NotConverted, shortened
from cacheblend_documents.formats import TEXT, format_of, readable_suffixes
from cacheblend_store import DocumentRecord
from msgspec.json import encode
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.collect.texts import Putting, document_of, put_name
from cacheblend_cli.corpus.citations import Citations, omissions_of, title_of
from cacheblend_cli.corpus.documents import Document, convert_bytes
from cacheblend_cli.corpus.places import PUT, SENT, bounded
from cacheblend_cli.corpus.scopes import ROOTS
from cacheblend_cli.corpus.search import WEAK, Lookup, more_note, search
from cacheblend_cli.errors import QueueFull
from cacheblend_cli.server.api_errors import ApiError, bad_request
from cacheblend_cli.server.bodies import PutBody, SearchBody, parse
from cacheblend_cli.server.document_names import distinct_paths, public_id, public_title
from cacheblend_cli.server.fair_pool import FairPool
from cacheblend_cli.server.http import (
    EVENTS,
    JSON,
    EventStream,
    encode_stream,
    json_body,
    media_type,
    raw_body,
    tenant_of,
    unless_disconnected,
)
from cacheblend_cli.server.preprocessing import named_chunk
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.types import SearchParams

_OFFICE = "application/vnd.openxmlformats-officedocument"
_SUFFIXES = {
    "text/plain": ".txt", "text/markdown": ".md", "text/html": ".html", "application/xhtml+xml": ".xhtml",
    "text/csv": ".csv", "text/tab-separated-values": ".tsv", "application/x-ndjson": ".jsonl", "application/x-ipynb+json": ".ipynb",
    "application/pdf": ".pdf", "application/epub+zip": ".epub", "message/rfc822": ".eml", "application/mbox": ".mbox",
    "text/calendar": ".ics", "text/vcard": ".vcf", "text/xml": ".xml", "application/xml": ".xml", "application/rss+xml": ".rss",
    "application/atom+xml": ".atom", "text/x-tex": ".tex", "application/x-tex": ".tex", "application/x-bibtex": ".bib",
    "application/rtf": ".rtf", "text/rtf": ".rtf",
    f"{_OFFICE}.wordprocessingml.document": ".docx", f"{_OFFICE}.presentationml.presentation": ".pptx",
    f"{_OFFICE}.spreadsheetml.sheet": ".xlsx", "application/vnd.ms-excel": ".xls",
    "application/vnd.oasis.opendocument.spreadsheet": ".ods",
}  # fmt: skip
"""Media type in lower case -> file suffix, which selects the converter. Of other types, the document's id has it."""
_BYTES = "application/octet-stream"
_NOT_FILES = ("multipart/", "application/x-www-form-urlencoded")


async def put_document(request: Request, state: ServerState) -> Response:
    """Store a document and compute its KV. Clients that accept text/event-stream receive progress."""
    document_id = request.path_params["id"]
    if not document_id.strip() or len(document_id) > 256 or not document_id.isprintable():
        raise bad_request("a document id must have 1 to 256 printable characters", "id")
    tenant = tenant_of(request)
    upload = await _upload(request, put_name(tenant.name, document_id))
    with ExitStack() as held:
        if upload.pool(state) is state.pools.heavy:  # its chunks are in memory until all of them are stored
            await unless_disconnected(request, state.large_uploads[tenant.name].acquire())
            held.callback(state.large_uploads[tenant.name].release)
        putting, title = await unless_disconnected(request, upload.cut(state, tenant))
        del upload  # a copy of the text
        held.callback(_undo_later, state, putting)
        records = _stored(state, tenant, putting, document_id, title)
        if EVENTS in request.headers.get("accept", ""):
            return EventStream(encode_stream(state, records, EVENTS), held.pop_all())
        *_, document = await unless_disconnected(request, _all(records))
        return JSONResponse(document, 201 if putting.is_new else 200)


@dataclass(frozen=True)
class _Upload:
    """A document as it was sent: as text, or as the bytes of a file."""

    name: str
    content: str | bytes
    title: str = ""  # of a text
    file_name: str = ""  # of a file; its suffix selects the converter

    def pool(self, state: ServerState) -> FairPool:
        found = format_of(self.file_name) if isinstance(self.content, bytes) else TEXT
        return state.pools.heavy if found is None or not found.is_plain else state.pools.for_text(len(self.content))

    async def cut(self, state: ServerState, tenant: Tenant) -> tuple[Putting, str]:
        """Convert and cut the document. Returns its title, too. Raises ApiError, UsageError."""
        cancellation = Cancellation()

        def work() -> tuple[Putting, str]:
            if isinstance(self.content, bytes):
                document = _convert(self.name, self.file_name, self.content, cancellation)
                title = document.converted.title
            else:
                document = document_of(self.name, self.content, self.title)
                title = shortened(self.title.strip())
            return state.engine.put(state.store, document, tenant.salt, title, cancellation), title

        return await state.in_pool(tenant, work, self.pool(state), cancellation)


async def _upload(request: Request, name: str) -> _Upload:
    """Read the body. Raises ApiError."""
    media = media_type(request)
    if media == JSON:
        body = parse(PutBody, await json_body(request))
        return _Upload(name, body.text, body.title or "")
    if media in _SUFFIXES:
        file_name = f"document{_SUFFIXES[media]}"
    else:
        file_name = PurePosixPath(request.path_params["id"]).name
        is_named = media == _BYTES or PurePosixPath(file_name).suffix
        if media.startswith(_NOT_FILES) or not is_named:
            kinds = f"{JSON}, or a file whose media type or id (as in report.pdf) names its kind"
            raise ApiError(415, f"the body must be {kinds}{media and f'; it is {media}'}")
    return _Upload(name, await raw_body(request), file_name=file_name)


def _convert(name: str, file_name: str, data: bytes, cancellation: Cancellation) -> Document:
    """Convert a file. Raises ApiError: 415 if the file type is not supported here, 400 if the file cannot be read."""
    suffix = PurePosixPath(file_name).suffix.lower()
    try:
        return convert_bytes(name, file_name, data, cancellation)
    except NotConverted as error:
        if error.unread:
            kinds = " ".join(readable_suffixes())
            what = f"file type {suffix or file_name!r} is not supported here; supported: {kinds}"
            raise ApiError(415, what, code="unsupported_document") from error
        raise bad_request(f"the file cannot be read: {error.reason}", code="unreadable_document") from error


async def _stored(
    state: ServerState, tenant: Tenant, putting: Putting, document_id: str, title: str
) -> AsyncIterator[dict[str, Any]]:
    """Collect and commit. Yield records of the progress, then the document. Removes its chunks again on an error."""
    progress = {"id": document_id, "object": "document.progress"}
    try:
        more = True
        while more:
            yield {**progress, "stored": putting.num_stored, "chunks": len(putting.chunks)}
            more = await state.in_engine(putting.collect)
        await state.write(tenant, putting.commit)
    except Exception:  # also when the server stops
        await state.write(tenant, putting.undo)
        raise
    missing = {p.key for p in putting.missing}
    chunks = [
        {"id": p.key.hex(), "tokens": len(p.chunk.token_ids), "status": "new" if p.key in missing else "unchanged"}
        for p in putting.chunks
    ]
    about = {"id": document_id, "object": "document", "title": title or document_id}
    yield {**about, "omissions": putting.omissions, "chunks": chunks}


async def _all(records: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record async for record in records]


def _undo_later(state: ServerState, putting: Putting) -> None:
    """Undo an upload whose client disconnected, in the engine's thread, where a chunk may still be stored."""

    def undo() -> None:
        if not putting.settled:
            putting.undo()

    if not putting.settled:
        with suppress(QueueFull):  # the server stops
            state.engine.service.between_steps(undo)


async def list_documents(request: Request, state: ServerState) -> Response:
    """List the tenant's documents, sorted by name, and the file types that can be put. Files of the store's own tenant
    that share a file name have a path."""
    tenant = tenant_of(request)

    def read() -> dict[str, Any]:
        visible = visible_documents(state, tenant)
        roots = set() if tenant.name else {memo.name.partition("\0")[0] for memo in state.store.memos(ROOTS)}
        paths = distinct_paths(visible, roots)
        data = [
            {
                **_document_fields(record),
                **({"path": paths[name]} if name in paths else {}),
                "chunks": list(dict.fromkeys(chunk.key.hex() for chunk in record.chunks)),
                "updated": int(record.updated),
            }
            for name, record in sorted(visible.items())
        ]
        return {"object": "list", "data": data, "suffixes": readable_suffixes(), "max_bytes": state.max_body}

    return await _read_reply(request, state, read)


async def read_document(request: Request, state: ServerState) -> Response:
    """Return a document and its chunks in order: text, place, headings."""
    document_id, tenant = request.path_params["id"], tenant_of(request)

    def read() -> dict[str, Any]:
        visible = visible_documents(state, tenant).items()
        record = next((record for name, record in visible if public_id(name) == document_id), None)
        if record is None:
            raise _no_document(document_id)
        manifests = {chunk.key: state.store.undamaged(chunk.key) for chunk in record.chunks}
        chunks = [
            {
                "id": chunk.key.hex(),
                "index": chunk.index,
                "place": bounded(chunk.locator).text,
                "headings": bounded(chunk.locator).headings,
                "text": manifest.text if (manifest := manifests[chunk.key]) else "",
            }
            for chunk in record.chunks
        ]
        return {**_document_fields(record), "chunks": chunks}

    return await _read_reply(request, state, read)


async def read_chunk(request: Request, state: ServerState) -> Response:
    """Return a chunk, its document and place. Documents that came with a question have a digest and no title."""
    tenant = tenant_of(request)

    def read() -> dict[str, Any]:
        manifest = named_chunk(state, tenant, request.path_params["id"], "id")
        cited = Citations(state.store).of(manifest)
        title = cited.title or public_title(cited.name) * (not cited.name.startswith(SENT))
        return {
            "id": manifest.key.hex(),
            "object": "chunk",
            "document": public_id(cited.name),
            "title": title,
            "place": cited.place,
            "text": manifest.text,
        }

    return await _read_reply(request, state, read)


async def _read_reply(request: Request, state: ServerState, read: Callable[[], dict[str, Any]]) -> Response:
    """Return what `read` returns as JSON. Both run in a thread, so that a long reply does not block the event loop."""
    work = state.in_pool(tenant_of(request), lambda: encode(read()))
    return Response(await unless_disconnected(request, work), media_type=JSON)


async def delete_document(request: Request, state: ServerState) -> Response:
    """Delete an uploaded document, and the chunks that no other document has."""
    document_id, tenant = request.path_params["id"], tenant_of(request)

    def delete() -> None:
        name = put_name(tenant.name, document_id)
        records = [record for record in state.store.documents() if record.source == name]
        if not records:
            raise _no_document(document_id)
        state.store.remove_documents(record.key for record in records)

    await unless_disconnected(request, state.write(tenant, delete))
    return JSONResponse({"id": document_id, "object": "document.deleted", "deleted": True})


def _no_document(document_id: str) -> ApiError:
    return ApiError(404, f"no such document: {document_id[:80]!r}", code="document_not_found")


def visible_documents(state: ServerState, tenant: Tenant) -> dict[str, DocumentRecord]:
    """Return the latest record of each document of the tenant (put, or precomputed with its salt) by name."""
    own = set(state.engine.usable(state.store, tenant.salt))
    latest: dict[str, DocumentRecord] = {}
    for record in state.store.documents():
        known = latest.get(record.source)
        if record.collection in own and (known is None or known.updated < record.updated):
            latest[record.source] = record
    return latest


def count_documents(state: ServerState) -> int:
    return sum(len(visible_documents(state, tenant)) for tenant in state.keyring.tenants)


def _document_fields(record: DocumentRecord) -> dict[str, Any]:
    name = record.source
    kind, title = "document" if name.startswith(PUT) else "file", title_of(record) or public_title(name)
    return {"id": public_id(name), "object": kind, "title": title, "omissions": omissions_of(record.settings)}


async def search_chunks(request: Request, state: ServerState) -> Response:
    body, tenant = parse(SearchBody, await json_body(request)), tenant_of(request)
    return await _read_reply(request, state, lambda: {"object": "list", **_search(state, body, tenant)})


def _search(state: ServerState, body: SearchBody, tenant: Tenant) -> dict[str, Any]:
    data, citations = [], Citations(state.store)
    lookup = Lookup.with_weights(SearchParams.of(replace(state.settings, top_k=body.k)))
    found = search(state.store, body.query, lookup, state.engine.usable(state.store, tenant.salt))
    for hit in found.hits:
        state.found.append(hit.key)
        manifest = state.store.undamaged(hit.key)
        cited = [c for c in citations.all_of(manifest) if c.name == hit.source] if manifest else []
        data.append(
            {
                "id": hit.id,
                "document": public_id(hit.source),
                "title": next((c.title for c in cited if c.title), public_title(hit.source)),
                "place": next((c.place for c in cited), ""),
                "also_in": list(map(public_id, hit.others)),
                "index": hit.index,
                "score": round(hit.score, 4),
                "snippet": hit.snippet,
                "text": manifest.text if manifest else "",
            }
        )
    more = more_note(found.num_more, body.k) if found.num_more else ""
    return {"data": data, "notes": list(filter(None, (more, WEAK if found.weak else "")))}
