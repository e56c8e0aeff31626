"""The routes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from cacheblend_cli.server import documents, embedding, mcp_route
from cacheblend_cli.server.answering import answered
from cacheblend_cli.server.asking import ParsedRequest, sampling_of
from cacheblend_cli.server.auth import AuthMiddleware
from cacheblend_cli.server.bodies import AskBody, ChatBody, CompletionBody, PutBody, SearchBody, parse
from cacheblend_cli.server.conversation import read_messages
from cacheblend_cli.server.document_routes import delete_document, list_documents, put_document, read_document
from cacheblend_cli.server.errors import ApiError, bad
from cacheblend_cli.server.http import EVENTS, JSON, LINES, json_body, logged, tenant_of
from cacheblend_cli.server.ollama import routes as ollama
from cacheblend_cli.server.ollama.bodies import GenerateBody, OldEmbedBody, OllamaChatBody, OllamaEmbedBody, ShowBody
from cacheblend_cli.server.openapi import Answer, Operation, openapi
from cacheblend_cli.server.passages import with_passages
from cacheblend_cli.server.replies import Reply
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.version import __version__

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


def make_app(host: ServerState, *, is_owner: bool = False) -> Starlette:
    """The server's routes behind AuthMiddleware. is_owner: for connections that need no API key."""

    def route(named: str, answer: Answer) -> Route:
        method, path = named.split(" ")

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request, host)
            except HTTPException:
                raise
            except Exception as error:
                return logged(error, host).response(request.url.path)

        return Route(path, guarded, methods=[method])

    routes = [route(named, operation.answer) for named, operation in OPERATIONS.items()]
    if host.decoder is not None:
        routes.append(route("GET /handovers/{name}", _hand_over))
    routes += [route("GET /", _page), route("GET /page/{name}", _page)]
    return Starlette(
        routes=[*routes, Route(mcp_route.PATH, mcp_route.McpRoute(host), methods=["POST"])],
        middleware=[Middleware(AuthMiddleware, host=host, is_owner=is_owner)],
        exception_handlers={HTTPException: _no_route},
    )


async def _models(request: Request, host: ServerState) -> Response:
    settings, sampling = host.settings, host.sampling
    own = {
        "id": host.model, "object": "model", "created": int(host.started), "owned_by": "cacheblend", "max_model_len": host.engine.context,
        "defaults": {
            "mode": settings.mode, "ratio": settings.ratio, "k": settings.top_k, "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        },
    }  # fmt: skip
    name = request.path_params.get("name")
    if name not in (None, host.model):
        raise ApiError(404, f"no model {name[:80]!r} here", param="model", code="model_not_found")
    return JSONResponse({"object": "list", "data": [own]} if name is None else own)


async def _health(_: Request, host: ServerState) -> Response:
    return JSONResponse({"status": "ok", "version": __version__})


async def _ready(_: Request, host: ServerState) -> Response:
    status = "stopping" if host.draining else "stuck" if host.engine.is_stuck else "ready"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


async def _metrics(_: Request, host: ServerState) -> Response:
    return Response(host.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(_: Request, host: ServerState) -> Response:
    return JSONResponse(openapi(OPERATIONS))


async def _hand_over(request: Request, host: ServerState) -> Response:
    """KV of a prompt that is being decoded elsewhere, with ranges. Its name is a secret of 128 bits."""
    file = None if host.decoder is None else host.decoder.directory.find(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return FileResponse(file, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})


async def _page(request: Request, _: ServerState) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in _PAGE_FILES:
        raise HTTPException(404)
    return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)


async def _chat(request: Request, host: ServerState) -> Response:
    body = parse(ChatBody, await json_body(request))
    _check_model(host, body)
    _check_priority(request, body)
    of = with_passages(host, body, body.messages)
    turns = read_messages(of.messages)
    sampling = sampling_of(host.sampling, body, body.max_completion_tokens or body.max_tokens, body.num_logprobs)
    parsed = ParsedRequest(
        body, tenant_of(request), turns.question, sampling, turns.history, turns.system, found=of.alone
    )
    reply = replace(_reply(host, body, chat=True), passages=of.passages)
    return await answered(request, host, reply, [parsed], EVENTS if body.stream else None)


async def _complete(request: Request, host: ServerState) -> Response:
    body = parse(CompletionBody, await json_body(request))
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
    parsed = [ParsedRequest(body, tenant_of(request), text, sampling, raw=True) for text in body.prompts]
    return await answered(request, host, _reply(host, body, chat=False), parsed, EVENTS if body.stream else None)


def _reply(host: ServerState, body: AskBody, *, chat: bool) -> Reply:
    usage = bool(body.stream_options and body.stream_options.include_usage)
    echo, silent = (body.echo, body.max_tokens == 0) if isinstance(body, CompletionBody) else (False, False)
    own = partial(Reply, chat, host.model, host.engine.model.tokenizer, host.public)
    return own(usage=usage, explain=body.explain, echo=echo, silent=silent)


async def _search(request: Request, host: ServerState) -> Response:
    body = parse(SearchBody, await json_body(request))
    hits = await host.in_pool(lambda: documents.find(host, body.query, body.k, tenant_of(request)))
    return JSONResponse({"object": "list", "data": hits})


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    routes = ", ".join((*OPERATIONS, f"POST {mcp_route.PATH}", "GET /")).replace(":path", "")
    what = "no such route" if error.status_code == 404 else f"{request.method} is not allowed here"
    code = "unknown_route" if error.status_code == 404 else "method_not_allowed"
    refusal = ApiError(error.status_code, f"{what}; the routes are {routes}", code=code)
    refusal.headers.update(error.headers or {})
    return refusal.response(request.url.path)


def _check_model(host: ServerState, body: AskBody) -> None:
    if not host.any_model and body.model not in (None, "", host.model, "cacheblend"):
        refusal = f"the model {body.model[:80]!r} is not here; this server has {host.model}"
        raise ApiError(404, refusal, param="model", code="model_not_found")


def _check_priority(request: Request, body: AskBody) -> None:
    """Tenants do not go before others; the store's own key may."""
    if body.priority < 0 and tenant_of(request).name:
        raise ApiError(403, "a tenant's priority is 0 or more", param="priority", code="priority_refused")


OPERATIONS = {
    "POST /v1/chat/completions": Operation(
        "Answer a conversation", _chat, ChatBody, media=(JSON, EVENTS), session=True
    ),
    "POST /v1/completions": Operation("Continue a text", _complete, CompletionBody, media=(JSON, EVENTS), session=True),
    "POST /v1/search": Operation("Search the stored chunks", _search, SearchBody),
    "PUT /v1/documents/{id:path}": Operation(
        "Store a document", put_document, PutBody, (200, 201), (JSON, EVENTS), bytes_too=True
    ),
    "GET /v1/documents": Operation("List the documents", list_documents),
    "GET /v1/documents/{id:path}": Operation("Read a document", read_document),
    "DELETE /v1/documents/{id:path}": Operation("Delete a document", delete_document),
    "POST /v1/embeddings": Operation("Embed texts", embedding.embeddings, embedding.EmbedBody),
    "GET /v1/models": Operation("List the models", _models),
    "GET /v1/models/{name:path}": Operation("Describe a model", _models),
    "POST /api/chat": Operation(
        "Answer a conversation (Ollama)", ollama.chat, OllamaChatBody, media=(JSON, LINES), session=True
    ),
    "POST /api/generate": Operation(
        "Answer a prompt (Ollama)", ollama.generate, GenerateBody, media=(JSON, LINES), session=True
    ),
    "POST /api/embed": Operation("Embed texts (Ollama)", ollama.embed, OllamaEmbedBody),
    "POST /api/embeddings": Operation("Embed a text (Ollama, older form)", ollama.embed_one, OldEmbedBody),
    "POST /api/show": Operation("Describe a model (Ollama)", ollama.show, ShowBody),
    "GET /api/tags": Operation("List the models (Ollama)", ollama.tags),
    "GET /api/ps": Operation("List the loaded model (Ollama)", ollama.running),
    "GET /api/version": Operation("Version of Ollama whose API this is", ollama.version),
    "GET /health": Operation("Whether the process answers", _health),
    "GET /ready": Operation("Whether requests are taken", _ready, statuses=(200, 503)),
    "GET /metrics": Operation("Metrics for Prometheus", _metrics, media=("text/plain",)),
    "GET /openapi.json": Operation("This description", _openapi),
}
"""Every route of the API, by method and path."""
