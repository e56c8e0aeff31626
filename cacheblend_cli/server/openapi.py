"""The API's description at /openapi.json: OpenAPI 3.1, made from the types that check the bodies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from cacheblend_cli.server.bodies import ChatBody, CompletionBody, PutBody, SearchBody
from cacheblend_cli.server.embedding import EmbedBody, EmbedReply
from cacheblend_cli.server.errors import OLLAMA
from cacheblend_cli.server.http import EVENTS, LINES, SESSION
from cacheblend_cli.server.ollama import models
from cacheblend_cli.server.ollama.bodies import GenerateBody, OldEmbedBody, OllamaChatBody, OllamaEmbedBody, ShowBody
from cacheblend_cli.server.ollama.embedding import OldEmbedReply, OllamaEmbedReply
from cacheblend_cli.server.ollama.replies import GenerateReply, OllamaChatReply
from cacheblend_cli.server.schemas import (
    ChatReply,
    CompletionReply,
    Deleted,
    DocumentList,
    ErrorReply,
    Health,
    HitList,
    Model,
    ModelList,
    OllamaError,
    PutReply,
    Ready,
    WholeDocument,
)
from cacheblend_cli.version import __version__


@dataclass(frozen=True)
class Operation:
    """A route. body, reply: types of JSON; replies: of each status, in the place of 200. media: of replies that are not JSON.
    streams: media type of a reply in pieces. bytes_too: the body may be the bytes of a file. session: has the header
    X-Session-ID, both ways."""

    summary: str
    reply: Any = None
    body: Any = None
    replies: dict[int, Any] = field(default_factory=dict)
    media: str | None = None
    streams: str | None = None
    bytes_too: bool = False
    session: bool = False


OPERATIONS = {
    "POST /v1/chat/completions": Operation("Answer a conversation", ChatReply, ChatBody, streams=EVENTS, session=True),
    "POST /v1/completions": Operation("Continue a text", CompletionReply, CompletionBody, streams=EVENTS, session=True),
    "POST /v1/search": Operation("Search the stored chunks", HitList, SearchBody),
    "PUT /v1/documents/{id}": Operation(
        "Store a document", None, PutBody, {200: PutReply, 201: PutReply}, streams=EVENTS, bytes_too=True
    ),
    "GET /v1/documents": Operation("List the documents", DocumentList),
    "GET /v1/documents/{id}": Operation("Read a document", WholeDocument),
    "DELETE /v1/documents/{id}": Operation("Delete a document", Deleted),
    "POST /v1/embeddings": Operation("Embed texts", EmbedReply, EmbedBody),
    "GET /v1/models": Operation("List the models", ModelList),
    "GET /v1/models/{name}": Operation("Describe a model", Model),
    "POST /api/chat": Operation(
        "Answer a conversation (Ollama)", OllamaChatReply, OllamaChatBody, streams=LINES, session=True
    ),
    "POST /api/generate": Operation(
        "Answer a prompt (Ollama)", GenerateReply, GenerateBody, streams=LINES, session=True
    ),
    "POST /api/embed": Operation("Embed texts (Ollama)", OllamaEmbedReply, OllamaEmbedBody),
    "POST /api/embeddings": Operation("Embed a text (Ollama, older form)", OldEmbedReply, OldEmbedBody),
    "POST /api/show": Operation("Describe a model (Ollama)", models.Shown, ShowBody),
    "GET /api/tags": Operation("List the models (Ollama)", models.ListReply),
    "GET /api/ps": Operation("List the loaded model (Ollama)", models.RunningReply),
    "GET /api/version": Operation("Version of Ollama whose API this is", models.Version),
    "GET /health": Operation("Whether the process answers", Health),
    "GET /ready": Operation("Whether requests are taken", None, None, {200: Ready, 503: Ready}),
    "GET /metrics": Operation("Metrics for Prometheus", media="text/plain"),
    "GET /openapi.json": Operation("This description", dict[str, Any]),
}
"""Every route of the API, by method and path."""


def openapi() -> dict[str, Any]:
    """The description as an object of JSON."""
    types = [t for o in OPERATIONS.values() for t in (o.body, o.reply, *o.replies.values()) if t is not None]
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components([*types, ErrorReply, OllamaError], ref_template=template)
    schema_of = dict(zip(map(str, [*types, ErrorReply, OllamaError]), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in OPERATIONS.items():
        method, path = route.split(" ")
        paths.setdefault(path, {})[method.lower()] = _described(route, operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cacheblend",
            "version": __version__,
            "description": "OpenAI's and Ollama's APIs over stored chunks.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _described(route: str, operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    def content(kind: Any) -> dict[str, Any]:
        return {"application/json": {"schema": schema_of[str(kind)]}}

    replies: dict[str, dict[str, Any]] = {
        str(status): {"description": "Reply", "content": content(kind)}
        for status, kind in (operation.replies or {200: operation.reply}).items()
        if kind is not None
    }
    if operation.media:
        replies["200"] = {"description": "Reply", "content": {operation.media: {"schema": {"type": "string"}}}}
    if operation.streams:
        replies["200"]["content"][operation.streams] = {"schema": {"type": "string"}}
    refusal = OllamaError if OLLAMA in route else ErrorReply
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {**replies, "default": {"description": "Error", "content": content(refusal)}},
    }
    for name in ("id", "name"):
        if f"{{{name}}}" in route:
            schema = {"type": "string", "minLength": 1, "maxLength": 256}
            described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if operation.session:
        named = {
            "description": "Requests with the same value are answered by the same replica",
            "schema": {"type": "string"},
        }
        described["parameters"] = [{"name": SESSION, "in": "header", **named}]
        replies["200"]["headers"] = {SESSION: named}
    if operation.body is not None:
        files: dict[str, Any] = {"application/octet-stream": {}} if operation.bytes_too else {}
        described["requestBody"] = {"required": True, "content": content(operation.body) | files}
    return described
