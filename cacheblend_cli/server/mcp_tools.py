"""MCP tools and resources over an engine's HTTP API. Imports neither torch nor numpy."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, cast
from urllib.parse import quote

import httpx2
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError, ToolError
from mcp.server.mcpserver.resources import ResourceSecurity
from mcp.types import Resource, ToolAnnotations
from pydantic import BaseModel, ConfigDict, Field

from cacheblend_cli.errors import CacheBlendError, NotFoundError
from cacheblend_cli.version import __version__

_DOCUMENT = "cacheblend://documents/"
_INSTRUCTIONS = (
    "Passages and answers from the user's own documents, by a local model. `search` finds passages; `ask` answers from them and "
    "names its sources; cite a source by its title and place."
)
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)

Hits = Annotated[int, Field(ge=1, le=256, description="Number of passages.")]


class DocumentArgument(BaseModel):
    """A document to ask about."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(min_length=1)]
    id: Annotated[str, Field(max_length=256)] | None = None
    title: Annotated[str, Field(max_length=1024)] | None = None


async def _ready() -> None:
    """Do nothing: the engine is already running."""


class Api:
    """JSON requests to an engine. client: HTTP client with the engine's root URL. ready: starts the engine if needed;
    raises CacheBlendError."""

    def __init__(self, client: httpx2.AsyncClient, ready: Callable[[], Awaitable[None]] = _ready) -> None:
        self._client, self._ready = client, ready

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the reply. Raises CacheBlendError with the engine's message."""
        await self._ready()
        try:
            reply = await self._client.request(method, path, json=body)
            reply_body = reply.json()
        except httpx2.TransportError as error:
            raise CacheBlendError(
                f"the engine cannot be reached: {error or type(error).__name__}", "check that cacheblend serve runs"
            ) from error
        except ValueError as error:
            raise CacheBlendError(
                f"the reply at {self._client.base_url} is not JSON (HTTP {reply.status_code})",
                "check that the URL is of cacheblend serve",
            ) from error
        if reply.is_success:
            return cast(dict[str, Any], reply_body)
        detail = reply_body.get("error") if isinstance(reply_body, dict) else None
        message = detail["message"] if isinstance(detail, dict) else f"HTTP {reply.status_code}"
        hint = "give the server's API key in CACHEBLEND_API_KEY" if reply.status_code == 401 else None
        raise (NotFoundError if reply.status_code == 404 else CacheBlendError)(message, hint)


def make_server(api: Api, *, lists_documents: Callable[[], bool] = lambda: True) -> MCPServer[Any]:
    """Return the MCP server. lists_documents: whether to ask the engine for resources; otherwise the list is empty."""
    if not logging.root.handlers and logging.lastResort is not None:
        logging.root.addHandler(logging.lastResort)  # without a handler the SDK configures the root logger
    server = _Server(api, lists_documents)
    tools = Tools(api)
    for tool, title, effects in (
        (tools.search, "Search documents", _READS),
        (tools.ask, "Ask over documents", _READS),
        (tools.add_document, "Add a document", _ADDS),
        (tools.list_documents, "List documents", _READS),
    ):
        description = " ".join((tool.__doc__ or "").split())  # without the source's line breaks
        server.add_tool(tool, title=title, description=description, annotations=effects)
    # an id is a name in the store, never a path
    security = ResourceSecurity(exempt_params={"id"})
    server.resource(f"{_DOCUMENT}{{id}}", name="document", description="Text of a stored document.", security=security)(
        tools.read_document
    )
    return server


class _Server(MCPServer[Any]):
    """Lists stored documents as resources."""

    def __init__(self, api: Api, lists_documents: Callable[[], bool]) -> None:
        super().__init__(
            "cacheblend", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR", subscriptions=False
        )
        self._api, self._lists_documents = api, lists_documents

    async def list_resources(self) -> list[Resource]:
        if not self._lists_documents():
            return []
        try:
            found = (await self._api.call("GET", "/v1/documents"))["data"]
        except CacheBlendError as error:
            raise _resource_error(error) from error
        return [
            Resource(uri=_DOCUMENT + quote(d["id"], safe=""), name=d["id"], title=d["title"], mime_type="text/plain")
            for d in found
        ]


class Tools:
    """MCP tools. Models read these docstrings as descriptions."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def search(self, query: Annotated[str, Field(min_length=1)], k: Hits = 5) -> dict[str, Any]:
        """Find passages in the stored documents, best first. place: page or lines. score: higher is better. notes:
        whether even the best passage matches weakly."""
        found = await self._call("POST", "/v1/search", {"query": query, "k": k})
        passages = [{**_reference(hit), "score": hit["score"], "text": hit["text"]} for hit in found["data"]]
        return {"passages": passages, "notes": found["notes"]}

    async def ask(
        self,
        question: Annotated[str, Field(min_length=1)],
        k: Annotated[Hits | None, Field(description="Search for this many passages.")] = None,
        chunks: Annotated[list[str] | None, Field(description="Passage ids returned by search.")] = None,
        documents: Annotated[list[DocumentArgument] | None, Field(description="Texts to answer from.")] = None,
        max_tokens: Annotated[int | None, Field(ge=1, description="Maximum tokens of the answer.")] = None,
    ) -> dict[str, Any]:
        """Answer a question from stored passages with a local model. Searches unless chunks or documents are given.
        sources: the passages that the model read. not_in_sources: parts of the answer that stand in none of them."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "explain": True}
        if chunks:
            body["chunks"] = chunks
        if documents:
            body["documents"] = [document.model_dump(exclude_none=True) for document in documents]
        if k is not None or not (chunks or documents):
            body["search"] = {} if k is None else {"k": k}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        reply = await self._call("POST", "/v1/chat/completions", body)
        [choice], blend = reply["choices"], reply["blend"]
        sources = [
            {**_reference(chunk), "passage": "".join(text for text, _ in chunk["pieces"]).strip()}
            for chunk in blend["chunks"]
        ]
        return {
            "answer": choice["message"]["content"],
            "sources": sources,
            "not_in_sources": [claim["text"] for claim in blend["claims"] if not claim["found"]],
            "finish_reason": choice["finish_reason"],
            "notes": blend["notes"],
        }

    async def add_document(
        self,
        text: Annotated[str, Field(min_length=1)],
        title: Annotated[str, Field(max_length=1024)] | None = None,
        id: Annotated[
            str | None,
            Field(max_length=256, description="Replaces a document with the same id. Default: a digest of the text."),
        ] = None,
    ) -> dict[str, Any]:
        """Store a document for search and ask. Its KV cache is computed now."""
        name = id or "text-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        body = {"text": text, "title": title} if title else {"text": text}
        stored = await self._call("PUT", f"/v1/documents/{quote(name, safe='')}", body)
        return _summary(stored)

    async def list_documents(
        self,
        matching: Annotated[str, Field(description="Text in the title or id.")] = "",
        limit: Annotated[int, Field(ge=1)] = 100,
    ) -> dict[str, Any]:
        """List the stored documents. total: number of matching documents; the list may be shorter. omissions: what was
        left out of a document when it was read."""
        every = (await self._call("GET", "/v1/documents"))["data"]
        part = matching.casefold()
        found = [d for d in every if part in d["title"].casefold() or part in d["id"].casefold()]
        return {"documents": [_summary(d) for d in found[:limit]], "total": len(found)}

    async def read_document(self, id: str) -> str:
        """Return the text of a document."""
        try:
            found = await self._api.call("GET", f"/v1/documents/{quote(id, safe='')}")
        except CacheBlendError as error:
            raise _resource_error(error) from error
        return "".join(chunk["text"] for chunk in found["chunks"])

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            return await self._api.call(method, path, body)
        except CacheBlendError as error:
            raise ToolError(_message(error)) from error


def _reference(chunk: dict[str, Any]) -> dict[str, Any]:
    return {name: chunk[name] for name in ("id", "document", "title", "place")}


def _summary(document: dict[str, Any]) -> dict[str, Any]:
    summary = {"id": document["id"], "title": document["title"], "num_chunks": len(document["chunks"])}
    return summary | ({"omissions": document["omissions"]} if document["omissions"] else {})


def _resource_error(error: CacheBlendError) -> ResourceError:
    return (ResourceNotFoundError if isinstance(error, NotFoundError) else ResourceError)(_message(error))


def _message(error: CacheBlendError) -> str:
    return f"{error.message}\n{error.hint}" if error.hint else error.message
