"""Decoder of `cacheblend serve --decoder vllm:URL[,DIRECTORY]`."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cacheblend_cli.engine.engine import Request as EngineRequest
from cacheblend_cli.errors import UsageError
from cacheblend_cli.server.request_events import RequestEvents
from cacheblend_cli.server.server_state import ServerState
from cacheblend_vllm.client import Client
from cacheblend_vllm.events import RemoteEvents, can_decode_remotely
from cacheblend_vllm.files import HandOverDirectory

DIRECTORY = "/dev/shm/cacheblend"
KEY_VARIABLE = "VLLM_API_KEY"


class VLLMDecoder:
    """Hands prompts to a vLLM server. address: its root URL, and after a comma the directory of hand-overs. Raises
    UsageError."""

    def __init__(self, address: str) -> None:
        url, _, directory = address.partition(",")
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"--decoder vllm:{url} has no HTTP URL", "for example --decoder vllm:http://127.0.0.1:8000"
            )
        self.directory = HandOverDirectory(Path(directory or DIRECTORY).expanduser().absolute())
        self._client = Client(url, os.environ.get(KEY_VARIABLE, ""))
        self.routes = {"GET /handovers/{name}": self._send}

    def events(self, state: ServerState, request: EngineRequest) -> RequestEvents | None:
        """Submit a request that vLLM can decode. Raises QueueFull, UsageError."""
        if not can_decode_remotely(state.engine, request):
            return None
        return RemoteEvents(state, request, self._client, self.directory.new())

    async def _send(self, request: Request, _: ServerState) -> Response:
        """Send a hand-over; supports ranges. The name is a 128-bit secret."""
        file = self.directory.find(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return FileResponse(file, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})
