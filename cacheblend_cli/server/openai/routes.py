"""OpenAI's routes."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.server.answer_report import AnswerReport
from cacheblend_cli.server.api_errors import ApiError, bad_request
from cacheblend_cli.server.bodies import AskBody, ChatBody, CompletionBody, parse
from cacheblend_cli.server.http import EVENTS, json_body, tenant_of, unless_disconnected
from cacheblend_cli.server.model_names import check_model
from cacheblend_cli.server.openai.response import OpenAIResponse
from cacheblend_cli.server.preprocessing import ParsedRequest, parse_chat, sampling_of
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.serving import respond
from cacheblend_cli.types import NUM_HITS


async def models(request: Request, state: ServerState) -> Response:
    settings, sampling = state.settings, state.sampling
    own = {
        "id": state.model, "object": "model", "created": int(state.started), "owned_by": "cacheblend", "max_model_len": state.engine.context,
        "defaults": {
            "mode": settings.mode, "ratio": settings.ratio, "k": settings.top_k or NUM_HITS, "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        },
    }  # fmt: skip
    name = request.path_params.get("name")
    if name is not None:
        check_model(state.model, name)
    return JSONResponse({"object": "list", "data": [own]} if name is None else own | {"id": name})


async def chat(request: Request, state: ServerState) -> Response:
    body = parse(ChatBody, await json_body(request))
    _check(request, state, body)
    sampling = sampling_of(state.sampling, body, body.max_completion_tokens or body.max_tokens, body.num_logprobs)
    work = parse_chat(state, body, tenant_of(request), body.messages, sampling)
    parsed = await unless_disconnected(request, work)
    builder = _response_builder(request, state, body, parsed)
    return await respond(request, state, builder, [parsed], EVENTS if body.stream else None)


async def completions(request: Request, state: ServerState) -> Response:
    body = parse(CompletionBody, await json_body(request))
    _check(request, state, body)
    if body.stream and (body.echo or len(body.prompts) > 1):
        raise bad_request("echo and several prompts cannot be streamed", "stream")
    if body.echo and body.wants_chunks:
        raise bad_request("echo cannot be combined with documents, chunks or search", "echo")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens must be 1 or more, or 0 with echo", "max_tokens")
    max_tokens = None if body.max_tokens is None else max(1, body.max_tokens)
    sampling = sampling_of(state.sampling, body, max_tokens, body.logprobs)
    if body.echo:
        sampling = replace(sampling, prompt_logprobs=body.logprobs)
    parsed = [ParsedRequest(body, tenant_of(request), text, sampling, raw=True) for text in body.prompts]
    return await respond(
        request, state, _response_builder(request, state, body), parsed, EVENTS if body.stream else None
    )


def _response_builder(
    request: Request, state: ServerState, body: AskBody, parsed: ParsedRequest | None = None
) -> OpenAIResponse:
    """parsed: request of a chat, None for text completions."""
    echo, prompt_only = (body.echo, body.max_tokens == 0) if isinstance(body, CompletionBody) else (False, False)
    return OpenAIResponse(
        parsed is not None,
        body.model or state.model,
        AnswerReport(state.engine.model.tokenizer, state.public, body.explain, parsed.passages if parsed else None),
        str(request.base_url) if request.base_url.hostname else "http://localhost/",  # not a Unix socket's path
        usage=bool(body.stream_options and body.stream_options.include_usage),
        echo=echo,
        prompt_only=prompt_only,
    )


def _check(request: Request, state: ServerState, body: AskBody) -> None:
    """Refuse an unknown model, and a priority above normal except with the store's own key. Raises ApiError."""
    if not state.any_model and body.model:
        check_model(state.model, body.model)
    if body.priority < 0 and tenant_of(request).name:
        raise ApiError(403, "a tenant's priority must be 0 or more", param="priority", code="priority_refused")
