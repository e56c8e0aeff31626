"""The HTTP application: every route, by method and path, and their description at /openapi.json (OpenAPI 3.1)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from cacheblend_store import StoreError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from cacheblend_cli.server import embedding_routes, mcp_route
from cacheblend_cli.server.api_errors import ApiError
from cacheblend_cli.server.auth import EXPOSED, METHODS, AuthMiddleware
from cacheblend_cli.server.bodies import ChatBody, CompletionBody, PutBody, SearchBody
from cacheblend_cli.server.document_routes import (
    delete_document,
    list_documents,
    put_document,
    read_chunk,
    read_document,
    search_chunks,
)
from cacheblend_cli.server.http import EVENTS, JSON, LINES, SESSION, log_error
from cacheblend_cli.server.ollama import routes as ollama
from cacheblend_cli.server.ollama.protocol import GenerateBody, OldEmbedBody, OllamaChatBody, OllamaEmbedBody, ShowBody
from cacheblend_cli.server.openai import routes as openai
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.version import __version__

Handler = Callable[[Request, ServerState], Awaitable[Response]]
_DESCRIPTION = "The OpenAI and Ollama APIs over stored chunks."


@dataclass(frozen=True)
class Operation:
    """A route and its handler."""

    summary: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = (200,)  # successful responses
    media: tuple[str, ...] = (JSON,)  # media types of the response
    answers: str = ""  # media type of streamed answers; request and response then have the header X-Session-ID


def openapi(operations: Mapping[str, Operation]) -> dict[str, Any]:
    """Return the description as a JSON object. operations: "METHOD /path" -> Operation."""
    bodies = [operation.body for operation in operations.values() if operation.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in operations.items():
        method, path = route.replace(":path", "").split(" ")
        paths.setdefault(path, {})[method.lower()] = _path_item(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "cacheblend", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _path_item(path: str, operation: Operation) -> dict[str, Any]:
    media = (*operation.media, operation.answers) if operation.answers else operation.media
    responses: dict[str, dict[str, Any]] = {
        str(status): {"description": "Response", "content": {kind: {} for kind in media}}
        for status in operation.statuses
    }
    responses["default"] = {"description": "Error", "content": {JSON: {}}}
    item: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    for name in ("id", "name"):
        if f"{{{name}}}" in path:
            schema = {"type": "string", "minLength": 1, "maxLength": 256}
            item["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if operation.answers:
        header = {"description": "Requests with the same value go to the same replica", "schema": {"type": "string"}}
        item["parameters"] = [{"name": SESSION, "in": "header", **header}]
        responses["200"]["headers"] = {SESSION: header}
    if operation.body is not None:
        content: dict[str, Any] = {JSON: {"schema": {"$ref": f"#/components/schemas/{operation.body.__name__}"}}}
        if 201 in operation.statuses:  # a document, or the bytes of a file
            content["application/octet-stream"] = {}
        item["requestBody"] = {"required": True, "content": content}
    return item


_PAGE = Path(__file__).parent / "page"
_PAGE_FILES = frozenset(file.name for file in _PAGE.iterdir() if file.suffix in (".html", ".css", ".js"))
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(state: ServerState, *, is_owner: bool = False) -> Starlette:
    """Return the application behind AuthMiddleware. is_owner: connections need no API key."""

    def route(name: str, handler: Handler) -> Route:
        method, path = name.split(" ")

        async def handle(request: Request) -> Response:
            try:
                return await handler(request, state)
            except HTTPException:
                raise
            except Exception as error:
                return log_error(error, state).response(request.url.path)

        return Route(path, handle, methods=[method])

    routes = [route(name, operation.handler) for name, operation in OPERATIONS.items()]
    if state.decoder is not None:
        routes += [route(name, handler) for name, handler in state.decoder.routes.items()]
    routes += [route("GET /", _page), route("GET /page/{name}", _page)]
    middleware = [Middleware(AuthMiddleware, state=state, is_owner=is_owner)]
    if state.origins and not is_owner:  # first, because a browser asks without the key, and reads refusals
        # pages of these origins may send any header: clients add their own, such as X-Stainless-OS of OpenAI's
        cors: dict[str, Any] = {"allow_methods": METHODS, "allow_headers": ["*"], "allow_private_network": True}
        allowed = sorted(state.origins)
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=allowed, expose_headers=EXPOSED, **cors))
    return Starlette(
        routes=[*routes, Route(mcp_route.PATH, mcp_route.McpRoute(state), methods=["POST"])],
        middleware=middleware,
        exception_handlers={HTTPException: _no_route},
    )


async def _health(_: Request, state: ServerState) -> Response:
    return JSONResponse({"status": "ok", "version": __version__})


async def _ready(_: Request, state: ServerState) -> Response:
    """Return 503 if requests would be refused: the server stops, the engine is stuck, or the store's file is gone."""
    status = "stopping" if state.draining else "stuck" if state.engine.service.is_stuck else "ready"
    if status == "ready":
        try:
            state.store.check_file()
        except StoreError:
            status = "store unavailable"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


async def _metrics(_: Request, state: ServerState) -> Response:
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(_: Request, state: ServerState) -> Response:
    return JSONResponse(openapi(OPERATIONS))


async def _page(request: Request, _: ServerState) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in _PAGE_FILES:
        raise HTTPException(404)
    return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = ", ".join((*OPERATIONS, f"POST {mcp_route.PATH}", "GET /")).replace(":path", "")
    what = "no such route" if error.status_code == 404 else f"{request.method} is not allowed here"
    code = "unknown_route" if error.status_code == 404 else "method_not_allowed"
    refusal = ApiError(error.status_code, f"{what}; the routes are {routes}", code=code)
    refusal.headers.update(error.headers or {})
    return refusal.response(request.url.path)


OPERATIONS = {
    "POST /v1/chat/completions": Operation("Answer a conversation", openai.chat, ChatBody, answers=EVENTS),
    "POST /v1/completions": Operation("Continue a text", openai.completions, CompletionBody, answers=EVENTS),
    "POST /v1/search": Operation("Search the stored chunks", search_chunks, SearchBody),
    "PUT /v1/documents/{id:path}": Operation("Store a document", put_document, PutBody, (200, 201), (JSON, EVENTS)),
    "GET /v1/documents": Operation("List the documents", list_documents),
    "GET /v1/documents/{id:path}": Operation("Read a document", read_document),
    "DELETE /v1/documents/{id:path}": Operation("Delete a document", delete_document),
    "GET /v1/chunks/{id}": Operation("Read a chunk", read_chunk),
    "POST /v1/embeddings": Operation("Embed texts", embedding_routes.embeddings, embedding_routes.EmbedBody),
    "GET /v1/models": Operation("List the models", openai.models),
    "GET /v1/models/{name:path}": Operation("Describe a model", openai.models),
    "POST /api/chat": Operation("Answer a conversation (Ollama)", ollama.chat, OllamaChatBody, answers=LINES),
    "POST /api/generate": Operation("Answer a prompt (Ollama)", ollama.generate, GenerateBody, answers=LINES),
    "POST /api/embed": Operation("Embed texts (Ollama)", ollama.embed, OllamaEmbedBody),
    "POST /api/embeddings": Operation("Embed a text (Ollama, older form)", ollama.embed_one, OldEmbedBody),
    "POST /api/show": Operation("Describe a model (Ollama)", ollama.show, ShowBody),
    "GET /api/tags": Operation("List the models (Ollama)", ollama.tags),
    "GET /api/ps": Operation("List the loaded model (Ollama)", ollama.running),
    "GET /api/version": Operation("Version of the Ollama API", ollama.version),
    "GET /health": Operation("Liveness", _health),
    "GET /ready": Operation("Readiness", _ready, statuses=(200, 503)),
    "GET /metrics": Operation("Metrics for Prometheus", _metrics, media=("text/plain",)),
    "GET /openapi.json": Operation("OpenAPI description", _openapi),
}
"""Every route of the API, by method and path."""
