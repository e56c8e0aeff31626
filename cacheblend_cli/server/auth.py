"""Checks before every route: API keys, sizes of bodies, sites whose pages may use the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

from cacheblend_cli.server.errors import OLLAMA, ApiError, stopping
from cacheblend_cli.server.state import ServerState

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
_BODIES = 8
"""Bodies of the largest size that may be in memory at once."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


class AuthMiddleware:
    """Refuse a request, or pass it on and count it. For /v1, /api and /mcp the tenant is put into the scope's state.

    is_owner: requests come from this machine's user and need no key; they are of the store's own tenant.
    """

    def __init__(self, app: App, host: ServerState, *, is_owner: bool = False) -> None:
        self._app, self._host, self._is_owner = app, host, is_owner

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            received = len(message.get("body", b""))
            size += received
            self._host.body_bytes += received
            if size > self._host.max_body:
                raise self._too_large()
            if self._host.body_bytes > _BODIES * self._host.max_body:
                raise ApiError(503, "too many large requests at once", code="overloaded", retry_after_s=1)
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            if _needs_key(scope["path"]):
                with self._host:
                    await self._app(scope, counted, noted)
            else:
                await self._app(scope, counted, noted)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, noted)
        finally:
            self._host.body_bytes -= size
            route = getattr(scope.get("route"), "path", "(none)")
            self._host.metrics.request(route, status)

    def _check(self, scope: Message) -> None:
        """Raises ApiError."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (
            "transfer-encoding" in headers and "content-length" in headers
        ):  # proxies may disagree on where the body ends
            error = ApiError(400, "Content-Length and Transfer-Encoding were both sent", code="ambiguous_length")
            error.headers["Connection"] = "close"
            raise error
        names, has_port = self._host.names, scope.get("server", (None, None))[1] is not None
        if names is not None and has_port:
            _check_site(headers, names)
        if _needs_key(scope["path"]):
            keyring = self._host.keyring
            tenant = keyring.own if self._is_owner else keyring.tenant_of(headers.get("authorization"))
            if tenant is None:
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                error.headers["WWW-Authenticate"] = "Bearer"
                raise error
            scope.setdefault("state", {})["tenant"] = tenant
            if self._host.draining:
                raise stopping()
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._host.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._host.max_body} bytes", code="body_too_large")


def _check_site(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse what a browser sends for a page of another site: a Host that is not among `names`, or an Origin on the web
    that is not the server's own. Origins of other schemes are programs on this machine, such as a browser's extensions.
    Raises ApiError."""
    host = headers.get("host", "").lower()
    if (name := _without_port(host)) not in names:
        raise ApiError(403, f"host name not allowed: {name[:80]!r}", code="host_refused")
    origin = headers.get("origin", "").lower()
    if origin == "null" or (origin.startswith(("http://", "https://")) and origin.partition("://")[2] != host):
        raise ApiError(403, f"pages of another site may not use this server: {origin[:80]!r}", code="origin_refused")


def _needs_key(path: str) -> bool:
    return path.startswith(("/v1/", OLLAMA)) or path == "/mcp"


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
