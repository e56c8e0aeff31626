"""The description at /openapi.json: OpenAPI 3.1, with schemas generated from the types that validate bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cacheblend_cli.server.http import JSON, SESSION
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.version import __version__

Handler = Callable[[Request, ServerState], Awaitable[Response]]
_DESCRIPTION = "The OpenAI and Ollama APIs over stored chunks."


@dataclass(frozen=True)
class Operation:
    """A route and its handler."""

    summary: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = (200,)  # of successful responses
    media: tuple[str, ...] = (JSON,)  # media types of the response
    answers: str = ""  # media type of streamed answers; request and response then have the header X-Session-ID


def openapi(operations: Mapping[str, Operation]) -> dict[str, Any]:
    """Return the description as a JSON object. operations: "METHOD /path" -> Operation."""
    bodies = [operation.body for operation in operations.values() if operation.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in operations.items():
        method, path = route.replace(":path", "").split(" ")
        paths.setdefault(path, {})[method.lower()] = _path_item(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "cacheblend", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _path_item(path: str, operation: Operation) -> dict[str, Any]:
    media = (*operation.media, operation.answers) if operation.answers else operation.media
    responses: dict[str, dict[str, Any]] = {
        str(status): {"description": "Response", "content": {kind: {} for kind in media}}
        for status in operation.statuses
    }
    responses["default"] = {"description": "Error", "content": {JSON: {}}}
    item: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    for name in ("id", "name"):
        if f"{{{name}}}" in path:
            schema = {"type": "string", "minLength": 1, "maxLength": 256}
            item["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if operation.answers:
        header = {"description": "Requests with the same value go to the same replica", "schema": {"type": "string"}}
        item["parameters"] = [{"name": SESSION, "in": "header", **header}]
        responses["200"]["headers"] = {SESSION: header}
    if operation.body is not None:
        content: dict[str, Any] = {JSON: {"schema": {"$ref": f"#/components/schemas/{operation.body.__name__}"}}}
        if 201 in operation.statuses:  # a document, or the bytes of a file
            content["application/octet-stream"] = {}
        item["requestBody"] = {"required": True, "content": content}
    return item
