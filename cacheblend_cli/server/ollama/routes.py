"""Ollama's routes, which use the functions of /v1."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec.json import encode
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.engine.events import Done, Event, Token
from cacheblend_cli.server.answer_report import AnswerReport, finish_reason
from cacheblend_cli.server.api_errors import ApiError, as_api_error
from cacheblend_cli.server.bodies import AskBody, Message, parse
from cacheblend_cli.server.embedding_routes import check_embedding_model, embed_texts
from cacheblend_cli.server.http import JSON, LINES, any_body, tenant_of, unless_disconnected
from cacheblend_cli.server.model_names import check_model
from cacheblend_cli.server.ollama import models
from cacheblend_cli.server.ollama.models import timestamp
from cacheblend_cli.server.ollama.protocol import (
    OPTIONS,
    AnswerBody,
    GenerateBody,
    OldEmbedBody,
    OllamaChatBody,
    OllamaEmbedBody,
    ShowBody,
)
from cacheblend_cli.server.preprocessing import ParsedRequest, PreparedRequest, parse_chat, sampling_of
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.serving import respond
from cacheblend_cli.types import Answer, Piece, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class OllamaResponse:
    """Builder of the response to one request."""

    chat: bool  # /api/chat, else /api/generate
    model: str  # name in the request
    report: AnswerReport
    started_ns: int = field(default_factory=time.monotonic_ns)

    def full(self, ends: Sequence[Done], prepared: Sequence[PreparedRequest]) -> dict[str, Any]:
        [done], [one] = ends, prepared
        [answer] = done.answers
        logprobs = self._logprobs(answer.logprobs)
        return self._record(answer.text, answer.reasoning, **logprobs, **self._last(done, one))

    async def stream(self, events: AsyncIterator[Event], prepared: PreparedRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield an object for each piece of text, and a last one with statistics. Log-probabilities come with the text
        that their tokens complete."""
        tokens: list[TokenLogprob] = []
        async for event in events:
            if isinstance(event, Token):
                tokens.append(event.logprob)
            elif isinstance(event, Piece):
                text, reasoning = ("", event.text) if event.reasoning else (event.text, "")
                yield self._record(text, reasoning, done=False, **self._logprobs(tokens))
                tokens.clear()
            elif isinstance(event, Done):
                yield self._record("", **self._logprobs(tokens), **self._last(event, prepared))

    def loaded(self) -> dict[str, Any]:
        """Return the response to a request without a prompt: the model is loaded."""
        return self._record("", done_reason="load")

    def _record(self, text: str, reasoning: str = "", *, done: bool = True, **rest: Any) -> dict[str, Any]:
        thinking = {"thinking": reasoning} if reasoning else {}
        content: dict[str, Any] = {"response": text, **thinking}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, **thinking}}
        return {"model": self.model, "created_at": timestamp(), "done": done, **rest, **content}

    def _last(self, done: Done, prepared: PreparedRequest) -> dict[str, Any]:
        answer = done.answers[0]
        return {
            "done_reason": finish_reason(answer),
            "total_duration": time.monotonic_ns() - self.started_ns,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": _ns(answer.timing.ttft_s),
            "eval_count": len(answer.generated_ids),
            "eval_duration": _eval_ns(answer),
            "blend": self.report.blend(done, prepared),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": [self.report.token(token) for token in tokens]} if tokens else {}


def _eval_ns(answer: Answer) -> int:
    """Return the decoding time of the tokens after the first, at least 1 because clients divide by it."""
    rate = answer.timing.decode_tokens_per_s
    return max(1, _ns((len(answer.generated_ids) - 1) / rate if rate > 0 else 0))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


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


async def tags(request: Request, state: ServerState) -> Response:
    found = await state.in_pool(tenant_of(request), lambda: models.language_model(state))
    return JSONResponse({"models": [found]})


async def running(request: Request, state: ServerState) -> Response:
    found = await state.in_pool(tenant_of(request), lambda: models.running_models(state))
    return JSONResponse({"models": found})


async def show(request: Request, state: ServerState) -> Response:
    body = parse(ShowBody, await any_body(request))
    name = body.model or body.name
    return JSONResponse(await state.in_pool(tenant_of(request), lambda: models.show(state, name)))


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
    started_ns = time.monotonic_ns()
    body = parse(OllamaEmbedBody, await any_body(request))
    body.check()
    check_embedding_model(state, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    texts = [] if texts == [""] else texts
    vectors, counts = await embed_texts(request, state, texts, body.dimensions, truncate=body.truncate is not False)
    reply = {
        "model": body.model,
        "embeddings": vectors.tolist(),
        "total_duration": time.monotonic_ns() - started_ns,
        "load_duration": 0,
        "prompt_eval_count": sum(counts),
    }
    return Response(encode(reply), media_type=JSON)


async def embed_one(request: Request, state: ServerState) -> Response:
    """POST /api/embeddings, for older clients."""
    body = parse(OldEmbedBody, await any_body(request))
    body.check()
    check_embedding_model(state, body.model)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await embed_texts(request, state, texts, None, truncate=True)
    return JSONResponse({"embedding": vectors[0].tolist() if texts else []})


async def _answer(request: Request, state: ServerState, body: AnswerBody, messages: Sequence[Message]) -> Response:
    """Answer the messages. Without messages, report that the model is loaded."""
    if not state.any_model:
        check_model(state.model, body.model)
    ask, is_chat, tokenizer = body.ask_body(), isinstance(body, OllamaChatBody), state.engine.model.tokenizer
    report = AnswerReport(tokenizer, state.public)
    if not messages:
        return JSONResponse(OllamaResponse(is_chat, body.model, report).loaded())
    try:
        sampling = _sampling(state, body, ask)
        if isinstance(body, GenerateBody) and body.raw:
            parsed = ParsedRequest(ask, tenant_of(request), body.prompt or "", sampling, raw=True)
        else:
            work = parse_chat(state, ask, tenant_of(request), messages, sampling)
            parsed = await unless_disconnected(request, work)
        builder = OllamaResponse(is_chat, body.model, replace(report, passages=parsed.passages))
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
