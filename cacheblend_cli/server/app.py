"""The routes."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cacheblend_cli import __version__
from cacheblend_cli.engine.jobs import Done, Event
from cacheblend_cli.server import documents
from cacheblend_cli.server.asking import Asking, Prepared, Wanted, checked, first_of, prepare, sampling_of
from cacheblend_cli.server.auth import AuthMiddleware
from cacheblend_cli.server.bodies import AskBody, ChatBody, CompletionBody, PutBody, SearchBody, parse
from cacheblend_cli.server.conversation import read_messages
from cacheblend_cli.server.errors import ApiError, as_api_error, bad
from cacheblend_cli.server.openapi import openapi
from cacheblend_cli.server.replies import Reply
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.server.tenants import Tenant

T = TypeVar("T")
logger = logging.getLogger("cacheblend")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def make_app(host: ServerState) -> Starlette:
    """The server's routes, behind its guard."""

    def route(method: str, path: str, answer: Callable[[Request, ServerState], Awaitable[Response]]) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                return await answer(request, host)
            except HTTPException:
                raise
            except Exception as error:
                return _told(_logged(error, host))

        return Route(path, guarded, methods=[method])

    return Starlette(
        routes=[
            route("POST", "/v1/chat/completions", _chat),
            route("POST", "/v1/completions", _complete),
            route("POST", "/v1/search", _search),
            route("PUT", "/v1/documents/{id:path}", _put),
            route("GET", "/v1/documents", _list),
            route("DELETE", "/v1/documents/{id:path}", _delete),
            route("GET", "/v1/models", _models),
            route("GET", "/v1/models/{name:path}", _models),
            route("GET", "/health", _health),
            route("GET", "/ready", _ready),
            route("GET", "/metrics", _metrics),
            route("GET", "/openapi.json", _openapi),
            route("GET", "/", _page),
            route("GET", "/page.{kind}", _page),
        ],
        middleware=[Middleware(AuthMiddleware, host=host)],
        exception_handlers={HTTPException: _no_route},
    )


async def _models(request: Request, host: ServerState) -> Response:
    own = {
        "id": host.model, "object": "model", "created": int(host.started), "owned_by": "cacheblend", "max_model_len": host.runtime.context,
    }  # fmt: skip
    name = request.path_params.get("name")
    if name not in (None, host.model):
        raise ApiError(404, f"no model {name[:80]!r} here", param="model", code="model_not_found")
    return JSONResponse({"object": "list", "data": [own]} if name is None else own)


async def _health(_: Request, host: ServerState) -> Response:
    return JSONResponse({"status": "ok", "version": __version__})


async def _ready(_: Request, host: ServerState) -> Response:
    status = "stopping" if host.draining else "stuck" if host.service.is_stuck else "ready"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


async def _metrics(_: Request, host: ServerState) -> Response:
    return Response(host.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(_: Request, host: ServerState) -> Response:
    return JSONResponse(openapi())


async def _page(request: Request, _: ServerState) -> Response:
    kind = request.path_params.get("kind")
    if kind not in (None, "css", "js"):
        raise HTTPException(404)
    name = "index.html" if kind is None else f"page.{kind}"
    return FileResponse(Path(__file__).parent / "page" / name, headers=_PAGE_HEADERS)


async def _chat(request: Request, host: ServerState) -> Response:
    body = parse(ChatBody, await _body(request))
    _check_model(host, body)
    _check_priority(request, body)
    said = read_messages(body.messages)
    sampling = sampling_of(host.sampling, body, body.max_completion_tokens or body.max_tokens, body.num_logprobs)
    wanted = Wanted(body, _tenant(request), said.question, sampling, said.history, said.system)
    return await _answered(request, host, _reply(host, body, chat=True), [wanted])


async def _complete(request: Request, host: ServerState) -> Response:
    body = parse(CompletionBody, await _body(request))
    _check_model(host, body)
    _check_priority(request, body)
    if body.stream and (body.echo or len(body.prompts) > 1):
        raise bad("echo and several prompts are not streamed", "stream")
    if body.echo and body.wants_chunks:
        raise bad("echo gives back what was sent, and with chunks the prompt is another", "echo")
    if body.max_tokens == 0 and not body.echo:
        raise bad("max_tokens is 1 or more, or 0 with echo", "max_tokens")
    sampling = sampling_of(
        host.sampling, body, None if body.max_tokens is None else max(1, body.max_tokens), body.logprobs
    )
    if body.echo:
        sampling = replace(sampling, prompt_logprobs=body.logprobs)
    wanted = [Wanted(body, _tenant(request), text, sampling, raw=True) for text in body.prompts]
    return await _answered(request, host, _reply(host, body, chat=False), wanted)


def _reply(host: ServerState, body: AskBody, *, chat: bool) -> Reply:
    usage = bool(body.stream_options and body.stream_options.include_usage)
    echo, silent = (body.echo, body.max_tokens == 0) if isinstance(body, CompletionBody) else (False, False)
    own = partial(Reply, chat, host.model, host.runtime.model.tokenizer, host.public)
    return own(usage=usage, explain=body.explain, echo=echo, silent=silent)


async def _answered(request: Request, host: ServerState, reply: Reply, wanted: list[Wanted]) -> Response:
    with host.preparing(len(wanted)):
        prepared = await _unless_left(request, _prepare_all(host, wanted))
    if not wanted[0].body.stream:
        ends = await _unless_left(request, _ends(host, prepared))
        return JSONResponse(reply.whole(ends, prepared))
    with ExitStack() as stack:
        asking = stack.enter_context(Asking(host, prepared[0].job))
        first = await _unless_left(request, asking.next())  # what is refused has a status of its own
        if isinstance(first, Done):
            checked(first)
        return EventStream(_written(host, reply, _from(first, asking), prepared[0]), stack.pop_all())


async def _prepare_all(host: ServerState, wanted: list[Wanted]) -> list[Prepared]:
    return [await host.in_pool(partial(prepare, host, one)) for one in wanted]


async def _ends(host: ServerState, prepared: list[Prepared]) -> list[Done]:
    with ExitStack() as stack:
        askings = [stack.enter_context(Asking(host, one.job)) for one in prepared]
        return [await asking.done() for asking in askings]


async def _from(first: Event, asking: Asking) -> AsyncIterator[Event]:
    yield first
    async for event in asking.events():
        yield event


async def _written(
    host: ServerState, reply: Reply, events: AsyncIterator[Event], prepared: Prepared
) -> AsyncIterator[bytes]:
    """Server-sent events. What fails after the beginning is told in the stream."""
    try:
        async for record in reply.stream(events, prepared):
            yield _event(record)
    except Exception as error:
        yield _event(_logged(error, host).body)
    yield b"data: [DONE]\n\n"


def _event(record: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n".encode()


class EventStream(StreamingResponse):
    """Sends pieces as they come. A client that leaves ends it, and what `stack` holds is given back in any case."""

    def __init__(self, pieces: AsyncIterator[bytes], stack: ExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, headers=headers, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._stack:
            await first_of(self.stream_response(send), _left(receive))


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. It is cancelled when the client leaves: ApiError 499 then, which nobody reads."""
    done = await first_of(work, _left(request.receive))
    if done is None:
        raise _gone()
    return done


def _gone() -> ApiError:
    return ApiError(499, "the client has left")


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _search(request: Request, host: ServerState) -> Response:
    body = parse(SearchBody, await _body(request))
    hits = await host.in_pool(lambda: documents.find(host, body.query, body.k, _tenant(request)))
    return JSONResponse({"object": "list", "data": hits})


async def _put(request: Request, host: ServerState) -> Response:
    body, document_id = parse(PutBody, await _body(request)), request.path_params["id"]
    if not document_id.strip() or len(document_id) > 256 or not document_id.isprintable():
        raise bad("the id of a document is 1 to 256 printable characters", "id")
    tenant = _tenant(request)
    document = documents.document_of(documents.put_name(tenant, document_id), body.text, body.title)
    about = host.runtime, host.store, document, host.settings, tenant.salt, (body.title or "").strip()
    putting = await host.in_pool(lambda: documents.Putting(*about))
    try:
        while await host.in_engine(putting.collect):
            pass
        await host.in_pool(putting.commit)
    except Exception:
        await run_in_threadpool(putting.undo)  # also when the server ends
        raise
    missing = {p.key for p in putting.missing}
    chunks = [
        {"id": p.key.hex(), "tokens": len(p.chunk.token_ids), "status": "new" if p.key in missing else "unchanged"}
        for p in putting.chunks
    ]
    record = {"id": document_id, "object": "document", "title": body.title or document_id, "chunks": chunks}
    return JSONResponse(record, 201 if putting.is_new else 200)


async def _list(request: Request, host: ServerState) -> Response:
    tenant = _tenant(request)
    data = await host.in_pool(lambda: list(documents.listed(host.runtime, host.store, tenant)))
    return JSONResponse({"object": "list", "data": data})


async def _delete(request: Request, host: ServerState) -> Response:
    document_id = request.path_params["id"]
    if not await run_in_threadpool(documents.delete, host.store, _tenant(request), document_id):
        raise ApiError(404, f"no document {document_id[:80]!r}", code="document_not_found")
    return JSONResponse({"id": document_id, "object": "document.deleted", "deleted": True})


def _logged(error: Exception, host: ServerState) -> ApiError:
    told = as_api_error(error)
    if told.status >= 500 and not isinstance(error, ApiError):
        logger.error("a request failed: %s", getattr(error, "message", error), exc_info=told.status == 500)
    told.message = host.public(told.message)
    return told


def _told(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    own = [route for route in request.app.routes if isinstance(route, Route) and route.methods]
    routes = [f"{method} {r.path.replace(':path', '')}" for r in own for method in r.methods or () if method != "HEAD"]
    what = "no such route" if error.status_code == 404 else f"{request.method} is not allowed here"
    code = "unknown_route" if error.status_code == 404 else "method_not_allowed"
    told = ApiError(error.status_code, f"{what}; the routes are {', '.join(routes)}", code=code)
    told.headers.update(error.headers or {})
    return _told(told)


async def _body(request: Request) -> bytes:
    """The body. Raises ApiError where its type is not JSON's, which a browser would send to another site without asking."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be application/json")
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise _gone() from error


def _check_model(host: ServerState, body: AskBody) -> None:
    if body.model not in (None, "", host.model, "cacheblend"):
        told = f"the model {body.model[:80]!r} is not here; this server has {host.model}"
        raise ApiError(404, told, param="model", code="model_not_found")


def _check_priority(request: Request, body: AskBody) -> None:
    """Tenants do not go before others; the store's own key may."""
    if body.priority < 0 and _tenant(request).name:
        raise ApiError(403, "a tenant's priority is 0 or more", param="priority", code="priority_refused")


def _tenant(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant
