"""Ollama's routes, which use the functions of /v1."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.server.api_errors import ApiError, as_api_error
from cacheblend_cli.server.embedding_routes import embed_texts, name_of, unknown_model
from cacheblend_cli.server.http import LINES, any_body, tenant_of, unless_disconnected
from cacheblend_cli.server.ollama import models
from cacheblend_cli.server.ollama.protocol import (
    OPTIONS,
    AnswerBody,
    GenerateBody,
    OldEmbedBody,
    OllamaChatBody,
    OllamaEmbedBody,
    ShowBody,
)
from cacheblend_cli.server.ollama.response import OllamaResponse
from cacheblend_cli.server.openai.protocol import AskBody, Message, parse
from cacheblend_cli.server.openai.response import OpenAIResponse
from cacheblend_cli.server.preprocessing import ParsedRequest, parse_chat, sampling_of
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.serving import respond
from cacheblend_cli.types import SamplingParams

VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients look whether a server is new enough for them."""
_OPTIONS = {
    **{field: f"options.{option}" for field, option in OPTIONS.items()},
    "response_format.json_schema.schema": "format", "response_format.json_schema": "format", "response_format": "format",
}  # fmt: skip
"""Field of /v1 -> Ollama's field with the same meaning."""
_OPTION = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, _OPTIONS))})(?![\w.])")


async def version(_: Request, state: ServerState) -> Response:
    return JSONResponse({"version": VERSION})


async def tags(_: Request, state: ServerState) -> Response:
    return JSONResponse({"models": await state.in_pool(lambda: models.list_models(state))})


async def running(_: Request, state: ServerState) -> Response:
    return JSONResponse({"models": await state.in_pool(lambda: models.running_models(state))})


async def show(request: Request, state: ServerState) -> Response:
    body = parse(ShowBody, await any_body(request))
    return JSONResponse(await state.in_pool(lambda: models.show(state, body.model or body.name)))


async def chat(request: Request, state: ServerState) -> Response:
    body = parse(OllamaChatBody, await any_body(request))
    return await _answer(request, state, body, list(body.messages or ()))


async def generate(request: Request, state: ServerState) -> Response:
    body = parse(GenerateBody, await any_body(request))
    system = [Message("system", body.system)] if body.system else []
    prompt = [Message("user", body.prompt)] if body.prompt else []
    if body.raw and prompt and system:
        raise ApiError(400, "raw sends the prompt unchanged: omit system", param="system")
    return await _answer(request, state, body, [*system, *prompt] if prompt else [])


async def embed(request: Request, state: ServerState) -> Response:
    """POST /api/embed."""
    started_ns = time.monotonic_ns()
    body = parse(OllamaEmbedBody, await any_body(request))
    _check_embedding(state, body)
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if texts == [""] else texts
    work = embed_texts(state, texts, body.dimensions, truncate=body.truncate is not False)
    vectors, counts = await unless_disconnected(request, work)
    return JSONResponse(
        {
            "model": body.model,
            "embeddings": vectors.tolist(),
            "total_duration": time.monotonic_ns() - started_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(counts),
        }
    )


async def embed_one(request: Request, state: ServerState) -> Response:
    """POST /api/embeddings, for older clients."""
    body = parse(OldEmbedBody, await any_body(request))
    _check_embedding(state, body)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await unless_disconnected(request, embed_texts(state, texts, None, truncate=True))
    return JSONResponse({"embedding": vectors[0].tolist() if texts else []})


async def _answer(request: Request, state: ServerState, body: AnswerBody, messages: Sequence[Message]) -> Response:
    """Answer the messages. Without messages, report that the model is loaded."""
    if not state.any_model:
        models.check(state, body.model)
    ask, is_chat, tokenizer = body.ask_body(), isinstance(body, OllamaChatBody), state.engine.model.tokenizer
    openai = OpenAIResponse(True, state.model, tokenizer, state.public)
    if not messages:
        return JSONResponse(OllamaResponse(is_chat, body.model, openai).loaded())
    try:
        sampling = _sampling(state, body, ask)
        if isinstance(body, GenerateBody) and body.raw:
            parsed = ParsedRequest(ask, tenant_of(request), body.prompt or "", sampling, raw=True)
        else:
            parsed = parse_chat(state, ask, tenant_of(request), messages, sampling)
        builder = OllamaResponse(is_chat, body.model, replace(openai, passages=parsed.passages))
        return await respond(request, state, builder, [parsed], LINES if ask.stream else None)
    except Exception as error:
        raise _in_ollama_fields(error) from error


def _sampling(state: ServerState, body: AnswerBody, ask: AskBody) -> SamplingParams:
    """Raises ApiError, UsageError."""
    sampling = sampling_of(state.sampling, ask, ask.max_tokens, body.num_logprobs)
    may_reason = state.engine.template.may_reason
    if body.think and not may_reason:
        raise ApiError(400, f"{body.model[:80]!r} does not support thinking", param="think")
    return replace(sampling, reasoning_tokens=0) if body.think is False and may_reason else sampling


def _in_ollama_fields(error: Exception) -> Exception:
    """Return the error with Ollama's options in place of /v1's fields; internal errors unchanged."""
    api_error = as_api_error(error)
    if api_error.status >= 500:
        return error
    api_error.message = _OPTION.sub(lambda found: _OPTIONS[found[0]], api_error.message)
    api_error.param = _OPTIONS.get(api_error.param or "", api_error.param)
    return api_error


def _check_embedding(state: ServerState, body: OllamaEmbedBody | OldEmbedBody) -> None:
    body.check()
    if not state.any_model and not models.is_named(name_of(state), body.model):
        raise unknown_model(state, body.model)
