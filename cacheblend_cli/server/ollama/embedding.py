"""Embeddings in the form of Ollama's API."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.server.bodies import parse
from cacheblend_cli.server.embedding import embedded, name_of, unknown_model
from cacheblend_cli.server.http import any_body, unless_left
from cacheblend_cli.server.ollama.bodies import OldEmbedBody, OllamaEmbedBody
from cacheblend_cli.server.ollama.models import is_named
from cacheblend_cli.server.state import ServerState


async def embed(request: Request, host: ServerState) -> Response:
    """/api/embed."""
    started_ns = time.monotonic_ns()
    body = parse(OllamaEmbedBody, await any_body(request))
    _check(host, body)
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if texts == [""] else texts
    work = embedded(host, texts, body.dimensions, truncate=body.truncate is not False)
    vectors, counts = await unless_left(request, work)
    return JSONResponse(
        {
            "model": body.model,
            "embeddings": vectors.tolist(),
            "total_duration": time.monotonic_ns() - started_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(counts),
        }
    )


async def embed_one(request: Request, host: ServerState) -> Response:
    """/api/embeddings, which older clients use."""
    body = parse(OldEmbedBody, await any_body(request))
    _check(host, body)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await unless_left(request, embedded(host, texts, None, truncate=True))
    return JSONResponse({"embedding": vectors[0].tolist() if texts else []})


def _check(host: ServerState, body: OllamaEmbedBody | OldEmbedBody) -> None:
    body.check()
    if not is_named(name_of(host), body.model):
        raise unknown_model(host, body.model)
