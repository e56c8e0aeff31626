"""Checks before every route: API keys, body sizes, browser origins."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_cli.errors import UsageError
from cacheblend_cli.server.api_errors import OLLAMA, ApiError, server_stopping

if TYPE_CHECKING:
    from cacheblend_cli.server.server_state import ServerState

_BODIES = 8
"""Number of bodies of the maximum size that may be in memory at once."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
ANY = "*"
METHODS = ("GET", "POST", "PUT", "DELETE")
EXPOSED = ("X-Session-ID", "Retry-After", "WWW-Authenticate")
"""Headers of responses that clients may read."""
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def read_origins(texts: Iterable[str]) -> frozenset[str]:
    """Return origins as browsers send them: in lower case, without the scheme's default port. Raises UsageError."""
    return frozenset(_read_origin(text.strip()) for text in texts)


def _read_origin(text: str) -> str:
    if text == ANY:
        return text
    found = _ORIGIN.fullmatch(text.lower())
    if found is None or int(found[3] or 0) > 65535:
        hint = "write scheme://host or scheme://host:port without a path, such as https://chat.example; * allows all"
        raise UsageError(f"--allow-origin {text!r} is not an origin", hint)
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{host}:{port}"


class AuthMiddleware:
    """Refuse a request, or count it and pass it on. For /v1, /api and /mcp, the scope's state gets the tenant.

    is_owner: all requests come from the user who runs the server: no key needed, the store's own tenant.
    """

    def __init__(self, app: ASGIApp, state: ServerState, *, is_owner: bool = False) -> None:
        self._app, self._state, self._is_owner = app, state, is_owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, size = 500, 0

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            received = len(message.get("body", b""))
            size += received
            self._state.body_bytes += received
            if size > self._state.max_body:
                raise self._too_large()
            if self._state.body_bytes > _BODIES * self._state.max_body:
                raise ApiError(503, "too many large requests in progress", code="overloaded", retry_after_s=1)
            return message

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            if _needs_key(scope["path"]):
                with self._state.in_progress():
                    await self._app(scope, receive_counted, send_noting_status)
            else:
                await self._app(scope, receive_counted, send_noting_status)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send_noting_status)
        finally:
            self._state.body_bytes -= size
            route = getattr(scope.get("route"), "path", "(none)")
            self._state.metrics.request(route, status)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        # proxies may disagree on where the body ends
        if "transfer-encoding" in headers and "content-length" in headers:
            error = ApiError(400, "both Content-Length and Transfer-Encoding were sent", code="ambiguous_length")
            error.headers["Connection"] = "close"
            raise error
        names, has_port = self._state.names, scope.get("server", (None, None))[1] is not None
        if names is not None and has_port:
            _check_site(headers, names, self._state.origins)
        if _needs_key(scope["path"]):
            keyring = self._state.keyring
            tenant = keyring.own if self._is_owner else keyring.tenant_of(headers.get("authorization"))
            if tenant is None:
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                error.headers["WWW-Authenticate"] = "Bearer"
                raise error
            scope.setdefault("state", {})["tenant"] = tenant
            if self._state.draining:
                raise server_stopping()
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._state.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._state.max_body} bytes", code="body_too_large")


def _check_site(headers: Mapping[str, str], names: Collection[str], origins: Collection[str]) -> None:
    """Refuse requests by pages of other sites: a Host not in `names`, or an http(s) Origin that is neither the server's
    own nor in `origins`. Origins with other schemes are local programs, such as browser extensions. Raises ApiError."""
    host = headers.get("host", "").lower()
    before, colon, port = host.rpartition(":")
    name = before if colon and port.isdigit() else host
    if name not in names:
        raise ApiError(403, f"host name not allowed: {name[:80]!r}", code="host_refused")
    origin = headers.get("origin", "").lower()
    if ANY in origins or origin in origins:
        return
    if origin == "null" or (origin.startswith(("http://", "https://")) and origin.partition("://")[2] != host):
        raise ApiError(403, f"origin not allowed: {origin[:80]!r}", code="origin_refused")


def _needs_key(path: str) -> bool:
    return path.startswith(("/v1/", OLLAMA)) or path == "/mcp"
