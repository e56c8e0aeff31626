"""Tools and resources of `cacheblend mcp` and of POST /mcp, used by the official SDK's client."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Cli
from omitting import leave_out

from cacheblend_cli.claims import LookedUp
from cacheblend_cli.claims.passages import Place
from cacheblend_cli.cli.main import run
from cacheblend_cli.engine.core.core import EngineCore
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.server import background
from cacheblend_cli.settings import Settings
from cacheblend_cli.sockets import socket_of

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

import httpx2  # noqa: E402
from mcp.client.stdio import StdioServerParameters  # noqa: E402
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

from cacheblend_cli.server import mcp_stdio  # noqa: E402
from cacheblend_cli.server.mcp_tools import Api, make_server  # noqa: E402

Use = Callable[[Any], Awaitable[Any]]
KEYS = ("plain-key-0000", "ada:ada-key-000000", "bob:bob-key-000000")
PARROT = "Jonas keeps a parrot at home.\n"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def through(server: Any, use: Use) -> Any:
    """The result of `use`, which gets a connected client."""

    async def connected() -> Any:
        async with asyncio.timeout(120), mcp.Client(server) as client:
            return await use(client)

    return asyncio.run(connected())


def stdio(*arguments: str, **environment: str) -> StdioServerParameters:
    code = "from cacheblend_cli.cli.main import main; main()"
    return StdioServerParameters(
        command=sys.executable, args=["-c", code, "mcp", *arguments], env={**os.environ, **environment}
    )


def over_http(server: Any, key: str = "") -> Any:
    url = server.url.removesuffix("/v1") + "/mcp"
    return streamable_http_client(url, http_client=httpx2.AsyncClient(headers=bearer(key), timeout=60))


async def every_tool(client: Any) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {"search", "ask", "add_document", "list_documents"}
    assert all(tool.description == " ".join(tool.description.split()) for tool in tools.values())
    assert tools["search"].annotations.read_only_hint
    assert not tools["add_document"].annotations.read_only_hint

    added = await client.call_tool("add_document", {"text": PARROT, "id": "pets/Jonas ü", "title": "Pets"})
    assert added.structured_content == {"id": "pets/Jonas ü", "title": "Pets", "num_chunks": 1}
    unnamed = (await client.call_tool("add_document", {"text": "Mara leads billing.\n"})).structured_content
    assert (
        unnamed["id"]
        == (await client.call_tool("add_document", {"text": "Mara leads billing.\n"})).structured_content["id"]
    )

    [passage] = (await client.call_tool("search", {"query": "parrot", "k": 2})).structured_content["passages"]
    assert (passage["document"], passage["title"]) == ("pets/Jonas ü", "Pets")
    assert PARROT in passage["text"]
    assert passage["place"]
    weak = await client.call_tool("search", {"query": "which zebra painted the ceiling before Jonas arrived"})
    assert weak.structured_content["passages"]
    assert "weak" in " ".join(weak.structured_content["notes"])

    asked = await client.call_tool("ask", {"question": "who keeps a parrot?", "k": 1, "max_tokens": 3})
    assert not asked.is_error
    [source] = asked.structured_content["sources"]
    assert (source["id"], source["place"]) == (passage["id"], passage["place"])
    assert PARROT.strip() in source["passage"]
    assert asked.structured_content["finish_reason"] in ("stop", "length")
    named = await client.call_tool("ask", {"question": "who?", "chunks": [passage["id"]], "max_tokens": 3})
    assert [s["id"] for s in named.structured_content["sources"]] == [passage["id"]]
    sent = [{"text": "Ada sails to Bergen.", "id": "sent", "title": "Trips"}]
    told = await client.call_tool("ask", {"question": "who sails?", "documents": sent, "max_tokens": 3})
    assert [(s["document"], s["title"]) for s in told.structured_content["sources"]] == [("sent", "Trips")]

    listed = (await client.call_tool("list_documents", {})).structured_content
    assert listed["total"] == 2
    part = (await client.call_tool("list_documents", {"matching": "PET", "limit": 1})).structured_content
    assert [d["id"] for d in part["documents"]] == ["pets/Jonas ü"]
    assert json.loads(asked.content[0].text) == asked.structured_content

    resources = {r.name: r for r in (await client.list_resources()).resources}
    assert set(resources) == {"pets/Jonas ü", unnamed["id"]}
    [text] = (await client.read_resource(resources["pets/Jonas ü"].uri)).contents
    assert text.text.endswith(PARROT)
    assert [t.uri_template for t in (await client.list_resource_templates()).resource_templates] == [
        "cacheblend://documents/{id}"
    ]


async def every_error(client: Any) -> None:
    for tool, arguments, part in (
        ("ask", {"question": "who?", "chunks": ["f" * 32]}, "f" * 32),
        ("ask", {"question": "zebra quagga okapi"}, "query"),
        ("add_document", {"text": "x", "id": "\n"}, "id"),
        ("search", {"query": "x", "k": 0}, "k"),
    ):
        failed = await client.call_tool(tool, arguments)
        assert failed.is_error, tool
        assert part in failed.content[0].text
    with pytest.raises(mcp.MCPError) as missing:
        await client.read_resource("cacheblend://documents/nothing")
    assert "nothing" in str(missing.value)


def test_tools_over_http(server: Any) -> None:
    through(over_http(server), every_tool)
    through(over_http(server), every_error)


def test_what_is_in_no_source_is_told(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [LookedUp("Jonas", 0, 5, "name", Place(0, 0, 5)), LookedUp("54", 6, 8, "number", None)]
    monkeypatch.setattr("cacheblend_cli.claims.check", lambda answer, texts: found)
    sent = [{"text": PARROT}]

    async def asked(client: Any) -> Any:
        body = {"question": "who?", "documents": sent, "max_tokens": 2}
        return (await client.call_tool("ask", body)).structured_content["not_in_sources"]

    assert through(over_http(server), asked) == ["54"]


def test_a_document_is_listed_with_what_is_left_out(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, {"deck.pptx": ["2 charts (slide 3)"]})
    server, octets = start(), {"Content-Type": "application/octet-stream"}
    assert server.client.put("/v1/documents/deck.pptx", content=PARROT.encode(), headers=octets).status_code == 201

    async def listed(client: Any) -> Any:
        return (await client.call_tool("list_documents", {})).structured_content["documents"]

    about = {"id": "deck.pptx", "title": "deck.pptx", "num_chunks": 1}
    assert through(over_http(server), listed) == [{**about, "omissions": ["2 charts (slide 3)"]}]


def test_tools_by_url_on_stdio(start: Callable[..., Any]) -> None:
    server = start(KEYS)

    async def refused(client: Any) -> str:
        told = await client.call_tool("search", {"query": "parrot"})
        assert told.is_error
        return str(told.content[0].text)

    async def use(client: Any) -> str:
        await every_tool(client)
        server.end()
        server.thread.join(20)
        return await refused(client)

    without_key = make_server(Api(httpx2.AsyncClient(base_url=str(server.client.base_url))))
    assert "CACHEBLEND_API_KEY" in through(without_key, refused)
    assert "cacheblend serve" in through(stdio("--url", f"{server.url}/", CACHEBLEND_API_KEY="plain-key-0000"), use)


def test_the_running_engine_of_a_store_needs_no_key(cli: Cli, start: Callable[..., Any]) -> None:
    server = start(KEYS)

    async def use(client: Any) -> None:
        [found] = (await client.call_tool("search", {"query": "parrot"})).structured_content["passages"]
        assert found["title"] == "1.md"
        assert [r.title for r in (await client.list_resources()).resources] == ["0.md", "1.md"]

    through(stdio(), use)
    assert 'route="/v1/search",status="200"' in server.state.metrics.text().decode()


def test_keys_and_tenants_over_http(start: Callable[..., Any]) -> None:
    server = start(KEYS)
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"Accept": "application/json, text/event-stream"}
    for key, status in (("", 401), ("wrong-key-0000", 401), ("ada-key-000000", 200)):
        reply = server.client.post("/mcp", json=message, headers={**accept, **bearer(key)})
        assert reply.status_code == status, reply.text
    assert server.client.get("/mcp", headers=bearer("ada-key-000000")).status_code == 405

    async def add(client: Any) -> None:
        assert not (await client.call_tool("add_document", {"text": PARROT, "id": "own"})).is_error

    async def ids(client: Any) -> list[str]:
        return [d["id"] for d in (await client.call_tool("list_documents", {})).structured_content["documents"]]

    through(over_http(server, "ada-key-000000"), add)
    assert through(over_http(server, "ada-key-000000"), ids) == ["own"]
    assert through(over_http(server, "bob-key-000000"), ids) == []


def test_a_client_that_leaves_ends_its_answer(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"question": "who?", "max_tokens": 900, "documents": [{"text": PARROT}]}
    params = {"name": "ask", "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    head = "POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Accept: application/json, text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    began, left, step = threading.Event(), threading.Event(), EngineCore.step

    def held(core: EngineCore) -> Any:
        began.set()
        assert left.wait(60)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", held)
    address = server.client.base_url
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall((head + body).encode())
        assert began.wait(60)
    while server.state.active:
        pass
    left.set()
    while not (stats := server.state.engine.service.stats()).cancelled:
        assert not stats.finished


def test_an_engine_is_started_at_the_first_call(cli: Cli, model: Any) -> None:
    settings = Settings(model=str(model), store=os.environ["CACHEBLEND_STORE"], search="words", threads=1)

    async def use(client: Any) -> list[dict[str, Any]]:
        assert (await client.list_resources()).resources == []
        assert not socket_of(settings).exists()
        found = await client.call_tool("search", {"query": "parrot"})
        assert not found.is_error, found.content[0].text
        return background.running(settings)

    try:
        [status] = through(stdio("--idle-exit", "60"), use)
        assert status["url"].startswith("unix:")
        assert status["pid"] != os.getpid()
    finally:
        background.stop_all(settings, 5.0)


def test_an_engine_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any) -> Any:
        raise NotFoundError("there is no /nowhere", "check the path")

    def made(*arguments: Any, **named: Any) -> Any:
        servers.append(make_server(*arguments, **named))
        return SimpleNamespace(run=lambda transport: None)

    servers: list[Any] = []
    monkeypatch.setattr(background, "spawn_own", cannot)
    monkeypatch.setattr(mcp_stdio, "make_server", made)
    mcp_stdio.serve_store(Settings(model="/nowhere", store=str(tmp_path / "store")), (), 60)

    async def use(client: Any) -> str:
        told = await client.call_tool("list_documents", {})
        assert told.is_error
        return str(told.content[0].text)

    assert "/nowhere" in through(servers[0], use)


def test_settings_of_another_engine_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mcp", "--url", "http://127.0.0.1:1", "--model", "x"]) == 2
    assert "--model" in capsys.readouterr().err
    assert run(["mcp", "--url", "127.0.0.1:1"]) == 2


def test_the_protocol_imports_no_torch() -> None:
    code = (
        "import sys; import cacheblend_cli.server.mcp_stdio\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
