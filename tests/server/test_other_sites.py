"""Pages of other sites: every method and route refuses a foreign Host and Origin, nothing is stored, and no reply
allows another site."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_cli.server.app import OPERATIONS

ROUTES = [
    tuple(named.replace("{id:path}", "page").replace("{name:path}", "tiny").split(" "))
    for named in (*OPERATIONS, "POST /mcp", "GET /", "GET /page/page.js")
]
BODY = {"text": "the parrot is at home", "query": "parrot", "messages": [{"role": "user", "content": "who?"}]}
FOREIGN = [
    ({"Host": "evil.example"}, "host_refused"),
    ({"Host": "127.0.0.1.evil.example:80"}, "host_refused"),
    ({"Origin": "http://evil.example"}, "origin_refused"),
    ({"Origin": "https://localhost.evil.example"}, "origin_refused"),
    ({"Origin": "http://127.0.0.1:1"}, "origin_refused"),
    ({"Origin": "null"}, "origin_refused"),
]
KEYS = ("plain-key-0000",)


@pytest.mark.parametrize(("headers", "code"), FOREIGN, ids=str)
def test_another_site_is_refused_on_every_route(shared: Any, headers: dict[str, str], code: str) -> None:
    for method, path in ROUTES:
        for sent in (method, "OPTIONS", "HEAD"):
            reply = shared.client.request(sent, path, json=BODY, headers=headers)
            assert reply.status_code == 403, (sent, path)
            assert not any(name.startswith("access-control-") for name in reply.headers)
        if method != "HEAD":
            told = shared.client.request(method, path, json=BODY, headers=headers).json()
            assert (told["code"] if path.startswith("/api/") else told["error"]["code"]) == code
    assert shared.client.get("/v1/documents").json()["data"] == []


def test_the_servers_own_page_and_programs_may_ask(shared: Any) -> None:
    own = str(shared.client.base_url).rstrip("/")
    for origin in (own, own.upper(), "chrome-extension://abcdef", "app://obsidian.md"):
        assert shared.client.post("/v1/search", json={"query": "a"}, headers={"Origin": origin}).status_code == 200
    assert shared.client.options("/v1/search", headers={"Origin": own}).status_code == 405


def test_with_keys_another_site_lacks_one(start: Any) -> None:
    server = start(KEYS)
    for method, path in ROUTES:
        if path.startswith(("/v1/", "/api/", "/mcp")):
            reply = server.client.request(method, path, json=BODY, headers={"Origin": "http://evil.example"})
            assert reply.status_code == 401, (method, path)
            assert not any(name.startswith("access-control-") for name in reply.headers)
