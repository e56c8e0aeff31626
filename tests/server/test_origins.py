"""Browser clients on other sites: only origins that --allow-origin names may use the server and read its responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import Cli

from cacheblend_cli.errors import UsageError
from cacheblend_cli.server.app import OPERATIONS
from cacheblend_cli.server.auth import read_origins
from cacheblend_cli.settings import resolve

CHAT = "https://chat.example"
PATHS = sorted({named.replace("{id:path}", "a").replace("{name:path}", "a").split(" ")[1] for named in OPERATIONS})
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-session-id, x-stainless-os",
}


def readable_by(reply: httpx.Response) -> str | None:
    return reply.headers.get("access-control-allow-origin")


@pytest.fixture
def allowing(start: Any) -> Any:
    return start(origins=read_origins([CHAT, "http://localhost:5173"]))


def test_an_allowed_origin_is_told_so_before_and_with_each_request(allowing: Any) -> None:
    for path in (*PATHS, "/mcp"):
        preflight = allowing.client.options(path, headers={"Origin": CHAT, **PREFLIGHT})
        assert (preflight.status_code, readable_by(preflight)) == (200, CHAT), path
        allowed = preflight.headers["access-control-allow-headers"].split(", ")
        assert {"authorization", "content-type", "x-session-id", "x-stainless-os"} <= set(allowed)
        assert "Origin" in preflight.headers["vary"]
        assert "access-control-allow-credentials" not in preflight.headers
    for origin in (CHAT, "http://localhost:5173"):
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 1}),
            ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "who?"}]}),
            ("/v1/search", {"query": "who"}),
        ):
            reply = allowing.client.post(path, json=body, headers={"Origin": origin, "X-Session-ID": "s1"})
            assert (reply.status_code, readable_by(reply)) == (200, origin), reply.text
            assert "Origin" in reply.headers["vary"]
            assert "X-Session-ID" in reply.headers["access-control-expose-headers"]
    methods = allowing.client.options("/v1/documents/a", headers={"Origin": CHAT, **PREFLIGHT}).headers
    assert set(methods["access-control-allow-methods"].split(", ")) >= {"GET", "POST", "PUT", "DELETE"}


def test_a_page_on_the_network_may_ask_a_server_on_this_machine(allowing: Any) -> None:
    asked = {"Origin": CHAT, "Access-Control-Request-Private-Network": "true", **PREFLIGHT}
    reply = allowing.client.options("/v1/models", headers=asked)
    assert reply.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://chat.example", "https://chat.example:8443", "null", CHAT + ".evil.example"],
)
def test_other_origins_are_refused_as_before(allowing: Any, origin: str) -> None:
    preflight = allowing.client.options("/v1/models", headers={"Origin": origin, **PREFLIGHT})
    assert (preflight.status_code, readable_by(preflight)) == (400, None)
    reply = allowing.client.get("/v1/models", headers={"Origin": origin})
    assert (reply.status_code, readable_by(reply), reply.json()["error"]["code"]) == (403, None, "origin_refused")


def test_an_allowed_origin_with_a_foreign_host_is_refused(allowing: Any) -> None:
    reply = allowing.client.get("/v1/models", headers={"Origin": CHAT, "Host": "evil.example"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_refused")


def test_an_allowed_origin_needs_the_key_and_can_read_that(start: Any) -> None:
    server = start(("plain-key-0000",), origins=read_origins([CHAT]))
    reply = server.client.get("/v1/models", headers={"Origin": CHAT})
    assert (reply.status_code, readable_by(reply)) == (401, CHAT)
    assert "WWW-Authenticate" in reply.headers["access-control-expose-headers"]
    assert server.client.options("/v1/models", headers={"Origin": CHAT, **PREFLIGHT}).status_code == 200
    keyed = {"Origin": CHAT, "Authorization": "Bearer plain-key-0000"}
    assert server.client.get("/v1/models", headers=keyed).status_code == 200
    foreign = server.client.get("/v1/models", headers=keyed | {"Origin": "https://evil.example"})
    assert readable_by(foreign) is None


def test_a_star_allows_every_origin(start: Any) -> None:
    server = start(origins=read_origins(["*"]))
    for origin in (CHAT, "null"):
        reply = server.client.get("/v1/models", headers={"Origin": origin})
        assert (reply.status_code, readable_by(reply)) == (200, "*")


def test_origins_are_read_as_browsers_send_them() -> None:
    assert read_origins(["HTTPS://Chat.Example:443", "http://a:80", "http://[::1]:3000", "app://obsidian.md", "*"]) == {
        "https://chat.example", "http://a", "http://[::1]:3000", "app://obsidian.md", "*",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "chat.example", "https://chat.example/", "https://chat.example/a", "https://", "null", "https://*.example",
     "https://a b", "https://u@a", "https://a:99999", "https://a:", "https://ä.example", "https://a?b", "**"],
)  # fmt: skip
def test_a_text_that_is_not_an_origin_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not an origin"):
        read_origins([text])


def test_serve_refuses_a_wrong_origin_from_each_place(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = cli("serve", "--allow-origin", CHAT, "--allow-origin", f"{CHAT}/page")
    assert wrong.code == 2
    assert "--allow-origin 'https://chat.example/page' is not an origin" in wrong.err
    monkeypatch.setenv("CACHEBLEND_ALLOW_ORIGIN", f"{CHAT}, nowhere")
    assert "'nowhere' is not an origin" in cli("serve").err


def test_a_project_sets_origins_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cacheblend.toml").write_text(f'allow_origin = ["{CHAT}"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cacheblend_cli.trust.is_trusted", lambda *_: False)
    resolved = resolve({})
    assert (resolved.settings.allow_origin, list(resolved.ignored)) == ((), ["allow_origin"])
    monkeypatch.setattr("cacheblend_cli.trust.is_trusted", lambda *_: True)
    assert resolve({}).settings.allow_origin == (CHAT,)
