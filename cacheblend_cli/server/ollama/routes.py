"""Ollama's routes. They answer by the functions of /v1."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.server import replies
from cacheblend_cli.server.answering import answered
from cacheblend_cli.server.asking import ParsedRequest, sampling_of
from cacheblend_cli.server.bodies import AskBody, Message, parse
from cacheblend_cli.server.conversation import read_messages
from cacheblend_cli.server.embedding import embedded, name_of, unknown_model
from cacheblend_cli.server.errors import ApiError, as_api_error
from cacheblend_cli.server.http import LINES, any_body, tenant_of, unless_left
from cacheblend_cli.server.ollama import models
from cacheblend_cli.server.ollama.bodies import (
    OPTIONS,
    AnswerBody,
    GenerateBody,
    OldEmbedBody,
    OllamaChatBody,
    OllamaEmbedBody,
    ShowBody,
)
from cacheblend_cli.server.ollama.replies import OllamaReply
from cacheblend_cli.server.passages import with_passages
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.types import SamplingParams

VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients look whether a server is new enough for them."""
_OPTIONS = {
    **{field: f"options.{option}" for field, option in OPTIONS.items()},
    "response_format.json_schema.schema": "format", "response_format.json_schema": "format", "response_format": "format",
}  # fmt: skip
"""Fields of a request, by those of /v1 that say the same."""
_OPTION = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, _OPTIONS))})(?![\w.])")


async def version(_: Request, host: ServerState) -> Response:
    return JSONResponse({"version": VERSION})


async def tags(_: Request, host: ServerState) -> Response:
    return JSONResponse({"models": await host.in_pool(lambda: models.listed(host))})


async def running(_: Request, host: ServerState) -> Response:
    return JSONResponse({"models": await host.in_pool(lambda: models.running(host))})


async def show(request: Request, host: ServerState) -> Response:
    body = parse(ShowBody, await any_body(request))
    return JSONResponse(await host.in_pool(lambda: models.shown(host, body.model or body.name)))


async def chat(request: Request, host: ServerState) -> Response:
    body = parse(OllamaChatBody, await any_body(request))
    return await _answered(request, host, body, list(body.messages or ()))


async def generate(request: Request, host: ServerState) -> Response:
    body = parse(GenerateBody, await any_body(request))
    system = [Message("system", body.system)] if body.system else []
    asked = [Message("user", body.prompt)] if body.prompt else []
    if body.raw and asked and system:
        raise ApiError(400, "with raw, the prompt is sent as it is: leave system out", param="system")
    return await _answered(request, host, body, [*system, *asked] if asked else [])


async def embed(request: Request, host: ServerState) -> Response:
    """/api/embed."""
    started_ns = time.monotonic_ns()
    body = parse(OllamaEmbedBody, await any_body(request))
    _check_embedding(host, body)
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
    _check_embedding(host, body)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await unless_left(request, embedded(host, texts, None, truncate=True))
    return JSONResponse({"embedding": vectors[0].tolist() if texts else []})


async def _answered(request: Request, host: ServerState, body: AnswerBody, messages: Sequence[Message]) -> Response:
    """Answer the messages; without any, say that the model is loaded."""
    if not host.any_model:
        models.check(host, body.model)
    ask, is_chat, tokenizer = body.ask_body(), isinstance(body, OllamaChatBody), host.engine.model.tokenizer
    written = replies.Reply(True, host.model, tokenizer, host.public)
    if not messages:
        return JSONResponse(OllamaReply(is_chat, body.model, written).loaded())
    try:
        sampling = _sampling(host, body, ask)
        if isinstance(body, GenerateBody) and body.raw:
            parsed = ParsedRequest(ask, tenant_of(request), body.prompt or "", sampling, raw=True)
        else:
            of = with_passages(host, ask, messages)
            turns = read_messages(of.messages)
            parsed = ParsedRequest(
                ask, tenant_of(request), turns.question, sampling, turns.history, turns.system, found=of.alone
            )
            written = replace(written, passages=of.passages)
        reply = OllamaReply(is_chat, body.model, written)
        return await answered(request, host, reply, [parsed], LINES if ask.stream else None)
    except Exception as error:
        raise _named(error) from error


def _sampling(host: ServerState, body: AnswerBody, ask: AskBody) -> SamplingParams:
    """Raises ApiError, UsageError."""
    sampling = sampling_of(host.sampling, ask, ask.max_tokens, body.num_logprobs)
    may_reason = host.engine.template.may_reason
    if body.think and not may_reason:
        raise ApiError(400, f"{body.model[:80]!r} does not support thinking", param="think")
    return replace(sampling, reasoning_tokens=0) if body.think is False and may_reason else sampling


def _named(error: Exception) -> Exception:
    """The error with the options of Ollama's API in the place of /v1's fields; an internal one as it is."""
    api_error = as_api_error(error)
    if api_error.status >= 500:
        return error
    api_error.message = _OPTION.sub(lambda found: _OPTIONS[found[0]], api_error.message)
    api_error.param = _OPTIONS.get(api_error.param or "", api_error.param)
    return api_error


def _check_embedding(host: ServerState, body: OllamaEmbedBody | OldEmbedBody) -> None:
    body.check()
    if not host.any_model and not models.is_named(name_of(host), body.model):
        raise unknown_model(host, body.model)
