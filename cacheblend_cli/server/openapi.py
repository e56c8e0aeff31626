"""The API's description at /openapi.json: OpenAPI 3.1, with the request bodies made from the types that check them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cacheblend_cli.server.http import JSON, SESSION
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.version import __version__

Answer = Callable[[Request, ServerState], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    """A route, and what answers it. body: type of its JSON. statuses: of replies without an error. media: of the reply;
    the second one is of a reply in pieces. bytes_too: the body may be the bytes of a file. session: has the header
    X-Session-ID, both ways."""

    summary: str
    answer: Answer
    body: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = (200,)
    media: tuple[str, ...] = (JSON,)
    bytes_too: bool = False
    session: bool = False


def openapi(operations: Mapping[str, Operation]) -> dict[str, Any]:
    """The description as an object of JSON. operations: by method and path."""
    bodies = [operation.body for operation in operations.values() if operation.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in operations.items():
        method, path = route.replace(":path", "").split(" ")
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
