"""API keys, limits, and isolation of tenants."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from cacheblend_cli.errors import QueueFull, UsageError
from cacheblend_cli.server.tenants import Keyring

KEYS = ("plain-key-0000", "ada:ada-key-000000", "bob:bob-key-000000")
PLAIN, ADA, BOB = "plain-key-0000", "ada-key-000000", "bob-key-000000"
PAGE = [{"text": "the lead of billing is Mara and she works in Bergen"}]


def put(server: Any, key: str, text: str, document_id: str = "page") -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return server.client.put(f"/v1/documents/{document_id}", json={"text": text}, headers=headers)


def get(server: Any, key: str, path: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    method = "POST" if body else "GET"
    return server.client.request(method, path, json=body or None, headers=headers).json()["data"]


def test_keys_are_needed_and_named(start: Any) -> None:
    server = start(KEYS)
    for key in ("", "wrong-key-0000", "ada", "ada:ada-key-000000"):
        reply = server.ask(key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert server.client.get("/v1/models").status_code == 401
    assert server.client.get("/health").status_code == 200
    for key in (PLAIN, ADA, BOB):
        assert server.ask(key).status_code == 200


def test_keys_make_sense() -> None:
    for bad in ("short", "with space 000", "ada:short"):
        with pytest.raises(UsageError):
            Keyring([bad], "")
    assert Keyring([], "x").tenant_of(None).salt == "x"  # type: ignore[union-attr]
    assert Keyring(["c2VjcmV0LWtleQ=="], "").tenant_of("Bearer c2VjcmV0LWtleQ==") is not None
    assert Keyring(["plain-key-0000"], "").tenant_of("Basic plain-key-0000") is None


def test_tenants_see_nothing_of_each_other(start: Any) -> None:
    server = start(KEYS)
    text = PAGE[0]["text"]
    assert put(server, ADA, text).status_code == 201
    [chunk] = put(server, BOB, text).json()["chunks"]
    assert chunk["status"] == "new"  # Ada's KV of the same text is not taken
    [ours] = get(server, ADA, "/v1/search", query="billing")
    [theirs] = get(server, BOB, "/v1/search", query="billing")
    assert ours["id"] != theirs["id"]
    assert get(server, PLAIN, "/v1/search", query="billing") == get(server, PLAIN, "/v1/documents") == []
    for key in (BOB, PLAIN):
        assert server.ask(key, chunks=[ours["id"]]).status_code == 404
    assert server.ask(ADA, chunks=[ours["id"]]).json()["blend"]["chunks"][0]["status"] == "exact"
    put(server, ADA, "a parrot at home", "own")
    assert server.client.delete("/v1/documents/own", headers={"Authorization": f"Bearer {BOB}"}).status_code == 404
    assert [d["id"] for d in get(server, ADA, "/v1/documents")] == ["own", "page"]


def test_documents_of_a_question_are_a_tenants_own(start: Any) -> None:
    server = start(KEYS)
    [ours] = server.ask(ADA, documents=PAGE).json()["blend"]["chunks"]
    assert server.ask(ADA, documents=PAGE).json()["blend"]["chunks"][0]["status"] == "exact"
    [theirs] = server.ask(BOB, documents=PAGE).json()["blend"]["chunks"]
    assert (theirs["status"], theirs["id"] == ours["id"]) == ("computed", False)
    assert server.ask(BOB, chunks=[ours["id"]]).status_code == 404


def test_the_beginning_of_an_id_means_ones_own_chunk(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(KEYS)
    put(server, ADA, PAGE[0]["text"])
    put(server, BOB, PAGE[0]["text"])
    [ours] = get(server, ADA, "/v1/search", query="billing")
    [theirs] = get(server, BOB, "/v1/search", query="billing")
    store = server.state.store  # both ids begin alike, as far as the store can tell
    monkeypatch.setattr(store, "matching", lambda name, limit: [bytes.fromhex(c["id"]) for c in (theirs, ours)])
    for key, chunk in ((ADA, ours), (BOB, theirs)):
        assert [c["id"] for c in server.ask(key, chunks=["0" * 8]).json()["blend"]["chunks"]] == [chunk["id"]]
    assert server.ask(PLAIN, chunks=["0" * 8]).json()["error"]["code"] == "chunk_not_found"
    assert server.ask(ADA, chunks=["0"]).status_code == 400


def test_tenants_do_not_go_before_others(start: Any) -> None:
    server = start(KEYS)
    refused = server.ask(ADA, priority=-100)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert server.ask(ADA, priority=1).status_code == server.ask(PLAIN, priority=-100).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"blend": {"ratio": 2}}, "blend.ratio"),
        ({"blend": {"check_layer": 99, "selector": "hkvd"}, "documents": PAGE}, "blend.check_layer"),
        ({"blend": {"block": 2}}, "blend.block"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "system", "content": "<|im_end|>"}, {"role": "user", "content": "a"}]}, "messages"),
    ],
    ids=str,
)
def test_errors_name_the_fields_of_the_request(shared: Any, body: dict[str, Any], param: str) -> None:
    reply = shared.ask(**body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert "--" not in error["message"]


def test_a_system_message_may_be_a_word_of_the_template(server: Any) -> None:
    for system in ("user", "a", "im_start"):
        reply = server.ask(messages=[{"role": "system", "content": system}, {"role": "user", "content": "who?"}])
        assert reply.status_code == 200, reply.text


def test_large_bodies_and_other_types(start: Any) -> None:
    server = start(max_body=2000)
    big = server.ask(messages=[{"role": "user", "content": "a" * 3000}])
    assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
    pieces = (b"a" * 500 for _ in range(10))
    reply = server.client.post("/v1/search", content=pieces, headers={"content-type": "application/json"})
    assert reply.status_code == 413
    plain = server.client.post("/v1/search", content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 415  # which a page of another site may send
    assert (
        server.client.post("/v1/search", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    )
    for path in ("/nothing", "/v1/nothing", "/page.exe"):
        told = server.client.get(path)
        assert (told.status_code, told.json()["error"]["code"]) == (404, "unknown_route")
        assert "POST /v1/chat/completions" in told.json()["error"]["message"]
    told = server.client.get("/v1/search")
    assert (told.status_code, told.headers["allow"]) == (405, "POST")


def test_other_host_names_are_refused_where_no_key_is_needed(start: Any) -> None:
    reply = start().client.get("/v1/models", headers={"Host": "evil.example:80"})
    assert reply.status_code == 403
    assert start(KEYS).client.get("/health", headers={"Host": "evil.example"}).status_code == 200


def test_a_full_queue_says_when_to_come_back(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: Any) -> None:
        raise QueueFull(3, 6.2)

    monkeypatch.setattr(server.state.engine.service, "submit", submit)
    for stream in (False, True):
        reply = server.ask(stream=stream)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
        assert reply.json()["error"]["code"] == "queue_full"


def test_a_client_that_leaves_is_cancelled(server: Any) -> None:
    address = server.client.base_url
    body = b'{"messages":[{"role":"user","content":"who?"}],"max_tokens":900,"stream":true,"temperature":3,"seed":1}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + body)
        connection.recv(10)  # the answer has begun
    while not (stats := server.state.engine.service.stats()).cancelled:
        assert not stats.finished
    assert stats.cancelled == 1


def test_an_answer_finishes_when_the_server_ends(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 60, "stream": True, "ignore_eos": True}
    release = threading.Event()
    with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.state.engine.service.between_steps(
            lambda: release.wait(30)
        )  # the answer is in progress when the server ends
        server.end()
        while not server.state.draining:
            pass
        release.set()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason": "length"' in rest[-2]
    server.thread.join(30)
    assert not server.thread.is_alive()


def test_metrics_count(server: Any) -> None:
    server.ask(documents=PAGE)
    server.ask(documents=PAGE)
    text = server.client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["cacheblend_finished_total"]) == 2
    assert float(lines['cacheblend_chunks_total{status="exact"}']) == 1
    assert float(lines['cacheblend_chunks_total{status="computed"}']) == 1
    assert float(lines["cacheblend_ttft_seconds_count"]) == 2
    assert float(lines["cacheblend_accepted_total"]) <= float(lines["cacheblend_proposed_total"])
    assert float(lines["cacheblend_tokens_per_step_count"]) == 2
    assert float(lines["cacheblend_tokens_per_step_sum"]) >= 2
    assert float(lines["cacheblend_kv_loaded_bytes_total"]) + float(lines["cacheblend_prefix_cached_total"]) > 0
    assert float(lines['cacheblend_requests_total{route="/v1/chat/completions",status="200"}']) == 2
