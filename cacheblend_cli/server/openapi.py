"""The API's description at /openapi.json: OpenAPI 3.1, with the request bodies made from the types that check them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from cacheblend_cli.server.bodies import ChatBody, CompletionBody, PutBody, SearchBody
from cacheblend_cli.server.embedding import EmbedBody
from cacheblend_cli.server.http import EVENTS, JSON, LINES, SESSION
from cacheblend_cli.server.ollama.bodies import GenerateBody, OldEmbedBody, OllamaChatBody, OllamaEmbedBody, ShowBody
from cacheblend_cli.version import __version__


@dataclass(frozen=True)
class Operation:
    """A route. body: type of its JSON. statuses: of replies without an error. media: of the reply; the second one is of a reply in
    pieces. bytes_too: the body may be the bytes of a file. session: has the header X-Session-ID, both ways."""

    summary: str
    body: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = (200,)
    media: tuple[str, ...] = (JSON,)
    bytes_too: bool = False
    session: bool = False


OPERATIONS = {
    "POST /v1/chat/completions": Operation("Answer a conversation", ChatBody, media=(JSON, EVENTS), session=True),
    "POST /v1/completions": Operation("Continue a text", CompletionBody, media=(JSON, EVENTS), session=True),
    "POST /v1/search": Operation("Search the stored chunks", SearchBody),
    "PUT /v1/documents/{id}": Operation("Store a document", PutBody, (200, 201), (JSON, EVENTS), bytes_too=True),
    "GET /v1/documents": Operation("List the documents"),
    "GET /v1/documents/{id}": Operation("Read a document"),
    "DELETE /v1/documents/{id}": Operation("Delete a document"),
    "POST /v1/embeddings": Operation("Embed texts", EmbedBody),
    "GET /v1/models": Operation("List the models"),
    "GET /v1/models/{name}": Operation("Describe a model"),
    "POST /api/chat": Operation("Answer a conversation (Ollama)", OllamaChatBody, media=(JSON, LINES), session=True),
    "POST /api/generate": Operation("Answer a prompt (Ollama)", GenerateBody, media=(JSON, LINES), session=True),
    "POST /api/embed": Operation("Embed texts (Ollama)", OllamaEmbedBody),
    "POST /api/embeddings": Operation("Embed a text (Ollama, older form)", OldEmbedBody),
    "POST /api/show": Operation("Describe a model (Ollama)", ShowBody),
    "GET /api/tags": Operation("List the models (Ollama)"),
    "GET /api/ps": Operation("List the loaded model (Ollama)"),
    "GET /api/version": Operation("Version of Ollama whose API this is"),
    "GET /health": Operation("Whether the process answers"),
    "GET /ready": Operation("Whether requests are taken", statuses=(200, 503)),
    "GET /metrics": Operation("Metrics for Prometheus", media=("text/plain",)),
    "GET /openapi.json": Operation("This description"),
}
"""Every route of the API, by method and path."""


def openapi() -> dict[str, Any]:
    """The description as an object of JSON."""
    bodies = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in OPERATIONS.items():
        method, path = route.split(" ")
        paths.setdefault(path, {})[method.lower()] = _described(path, operation)
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


def _described(path: str, operation: Operation) -> dict[str, Any]:
    replies: dict[str, dict[str, Any]] = {
        str(status): {"description": "Reply", "content": {media: {} for media in operation.media}}
        for status in operation.statuses
    }
    replies["default"] = {"description": "Error", "content": {JSON: {}}}
    described: dict[str, Any] = {"summary": operation.summary, "responses": replies}
    for name in ("id", "name"):
        if f"{{{name}}}" in path:
            schema = {"type": "string", "minLength": 1, "maxLength": 256}
            described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if operation.session:
        header = {
            "description": "Requests with the same value are answered by the same replica",
            "schema": {"type": "string"},
        }
        described["parameters"] = [{"name": SESSION, "in": "header", **header}]
        replies["200"]["headers"] = {SESSION: header}
    if operation.body is not None:
        content: dict[str, Any] = {JSON: {"schema": {"$ref": f"#/components/schemas/{operation.body.__name__}"}}}
        if operation.bytes_too:
            content["application/octet-stream"] = {}
        described["requestBody"] = {"required": True, "content": content}
    return described
