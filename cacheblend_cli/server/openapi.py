"""The API's description at /openapi.json: OpenAPI 3.1, made from the types that check the bodies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from cacheblend_cli import __version__
from cacheblend_cli.server.bodies import ChatBody, CompletionBody, PutBody, SearchBody
from cacheblend_cli.server.http import SESSION

Finish = Literal["stop", "length"]


class ErrorDetail(Struct):
    """message: for people. type: kind of error. param: the field that is wrong. code: for programs."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorReply(Struct):
    error: ErrorDetail


class Health(Struct):
    status: Literal["ok"]
    version: str


class Ready(Struct):
    status: Literal["ready", "stopping", "stuck"]


class Defaults(Struct):
    """Settings of a request that names none."""

    mode: str
    ratio: float | Literal["auto"]
    k: int
    max_tokens: int
    temperature: float


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    defaults: Defaults


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Hit(Struct):
    """A chunk that was found. place: page or lines in its document, for people. score: higher is better."""

    id: str
    document: str
    title: str
    place: str
    index: int
    score: float
    snippet: str
    text: str


class HitList(Struct):
    object: Literal["list"]
    data: list[Hit]


class Document(Struct):
    """chunks: their ids. updated: seconds since 1970."""

    id: str
    object: Literal["document", "file"]
    title: str
    chunks: list[str]
    updated: int


class DocumentList(Struct):
    """suffixes: of the names of files that can be put. max_bytes: of one of them."""

    object: Literal["list"]
    data: list[Document]
    suffixes: list[str]
    max_bytes: int


class DocumentChunk(Struct):
    """place: page or lines in the file, for people. headings: titles it stands under, the outermost first."""

    id: str
    index: int
    place: str
    headings: list[str]
    text: str


class WholeDocument(Struct):
    """A document's chunks in order."""

    id: str
    object: Literal["document", "file"]
    title: str
    chunks: list[DocumentChunk]


class PutChunk(Struct):
    id: str
    tokens: int
    status: Literal["new", "unchanged"]


class PutReply(Struct):
    id: str
    object: Literal["document"]
    title: str
    chunks: list[PutChunk]


class Deleted(Struct):
    id: str
    object: Literal["document.deleted"]
    deleted: bool


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplyMessage(Struct):
    role: Literal["assistant"]
    content: str


class ChatChoice(Struct):
    index: int
    message: ReplyMessage
    finish_reason: Finish
    logprobs: dict[str, Any] | None


class ChatReply(Struct):
    """blend: what became of the chunks, and timing; see docs/serve.md."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    blend: dict[str, Any]


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: Finish
    logprobs: dict[str, Any] | None


class CompletionReply(Struct):
    """blend: what became of the chunks, and timing; see docs/serve.md."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    blend: dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """A route. body, reply: types of JSON; replies: of each status, in the place of 200. media: of replies that are not JSON.
    bytes_too: the body may be the bytes of a file. session: has the header X-Session-ID, both ways."""

    summary: str
    reply: Any = None
    body: Any = None
    replies: dict[int, Any] = field(default_factory=dict)
    media: str | None = None
    streams: bool = False
    bytes_too: bool = False
    session: bool = False


OPERATIONS = {
    "POST /v1/chat/completions": Operation("Answer a conversation", ChatReply, ChatBody, streams=True, session=True),
    "POST /v1/completions": Operation("Continue a text", CompletionReply, CompletionBody, streams=True, session=True),
    "POST /v1/search": Operation("Search the stored chunks", HitList, SearchBody),
    "PUT /v1/documents/{id}": Operation(
        "Store a document", None, PutBody, {200: PutReply, 201: PutReply}, streams=True, bytes_too=True
    ),
    "GET /v1/documents": Operation("List the documents", DocumentList),
    "GET /v1/documents/{id}": Operation("Read a document", WholeDocument),
    "DELETE /v1/documents/{id}": Operation("Delete a document", Deleted),
    "GET /v1/models": Operation("List the models", ModelList),
    "GET /v1/models/{name}": Operation("Describe a model", Model),
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
    schemas, components = msgspec.json.schema_components([*types, ErrorReply], ref_template=template)
    schema_of = dict(zip(map(str, [*types, ErrorReply]), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in OPERATIONS.items():
        method, path = route.split(" ")
        paths.setdefault(path, {})[method.lower()] = _described(route, operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "cacheblend", "version": __version__, "description": "OpenAI's API over stored chunks."},
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
        replies["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {**replies, "default": {"description": "Error", "content": content(ErrorReply)}},
    }
    for name in ("id", "name"):
        if f"{{{name}}}" in route:
            schema = {"type": "string", "minLength": 1, "maxLength": 256}
            told["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if operation.session:
        named = {
            "description": "Requests with the same value are answered by the same replica",
            "schema": {"type": "string"},
        }
        told["parameters"] = [{"name": SESSION, "in": "header", **named}]
        replies["200"]["headers"] = {SESSION: named}
    if operation.body is not None:
        files: dict[str, Any] = {"application/octet-stream": {}} if operation.bytes_too else {}
        told["requestBody"] = {"required": True, "content": content(operation.body) | files}
    return told
