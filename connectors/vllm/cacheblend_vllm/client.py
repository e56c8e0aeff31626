"""Client of the vLLM server that decodes prompts prefilled here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from cacheblend_cli.server.api_errors import ApiError

_CONNECT_S, _READ_S = 5.0, 120.0


class Unreachable(Exception):
    """The decoder did not give a first token."""


class Client:
    """A vLLM server. url: its root URL. key: its API key, "" for none."""

    def __init__(self, url: str, key: str = "") -> None:
        self._model: str | None = None  # the server's name of the model, queried once
        timeout = httpx2.Timeout(_READ_S, connect=_CONNECT_S)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.AsyncClient(base_url=url.rstrip("/"), timeout=timeout, headers=headers, trust_env=False)

    async def token_ids(self, body: dict[str, Any]) -> AsyncIterator[list[int]]:
        """Yield token ids of a completion. Raises Unreachable before the first token, ApiError after it."""
        started = False
        try:
            if self._model is None:
                models = await self._client.get("/v1/models")
                self._model = str(models.raise_for_status().json()["data"][0]["id"])
            completion = {**body, "model": self._model, "stream": True, "return_token_ids": True}
            async with self._client.stream("POST", "/v1/completions", json=completion) as reply:
                if reply.status_code != 200:
                    raise Unreachable(
                        f"HTTP {reply.status_code}: {(await reply.aread())[:300].decode(errors='replace')}"
                    )
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    record = json.loads(line[6:])
                    if "error" in record:
                        raise ValueError(str(record["error"])[:300])
                    if ids := [i for choice in record["choices"] for i in choice["token_ids"] or ()]:
                        started = True
                        yield ids
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            if not started:
                raise Unreachable(f"{type(error).__name__}: {error}") from error
            raise ApiError(502, "the decoder failed during the answer", code="decoder_failed") from error
