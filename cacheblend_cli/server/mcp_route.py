"""Model Context Protocol over streamable HTTP, without sessions."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from cacheblend_cli.extras import install_hint
from cacheblend_cli.server.api_errors import ApiError
from cacheblend_cli.server.http import disconnected, raw_body
from cacheblend_cli.server.server_state import ServerState, first_of

PATH = "/mcp"


class McpRoute:
    """ASGI app for POST /mcp. Tools call the server's own routes with the client's API key."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one message of the protocol. Raises ApiError if the extra is not installed."""
        if find_spec("mcp") is None:
            raise ApiError(501, f"MCP is not installed on this server ({install_hint('mcp')})", code="mcp_missing")
        await run_in_threadpool(import_module, "cacheblend_cli.server.mcp_tools")  # takes seconds the first time
        body = await raw_body(Request(scope, receive))
        await first_of(self._answer(scope, body, send), disconnected(receive))

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        import httpx2
        from mcp.server.transport_security import TransportSecuritySettings

        from cacheblend_cli.server.mcp_tools import Api, make_server

        keys = {k: v for k, v in Request(scope).headers.items() if k == "authorization"}
        transport = httpx2.ASGITransport(scope["app"])
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", headers=keys, timeout=None
        ) as client:
            server = make_server(Api(client))
            server.streamable_http_app(
                json_response=True,
                stateless_http=True,
                max_request_body_size=self._state.max_body,
                # AuthMiddleware does it
                transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            )
            manager = server.session_manager  # without sessions it lives only for this request
            async with manager.run():
                await manager.handle_request(scope, _replay(body), send)


def _replay(body: bytes) -> Receive:
    """Return a receive function that yields a body already read, then blocks: `disconnected` watches the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive
