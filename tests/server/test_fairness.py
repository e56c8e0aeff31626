"""One tenant's work does not stop the others, and ends with its request."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from cacheblend_documents.limited_process import LimitedProcess

from cacheblend_cli.cancellation import Cancellation, Cancelled
from cacheblend_cli.corpus.embedding import Embedder
from cacheblend_cli.server import document_routes, embedding_routes
from cacheblend_cli.server.server_state import LIGHT_CHARACTERS

KEYS = ("plain-key-0000", "ada:ada-key-000000", "bob:bob-key-000000")
ADA, BOB = ({"Authorization": f"Bearer {name}-key-000000"} for name in ("ada", "bob"))
PAGE = "the lead of billing is Mara and she works in Bergen"
HTML = b"<html><body><p>Mara leads billing in Bergen.</p></body></html>"
NESTED = b"<div>" * 100_000  # takes minutes to convert
LONG = PAGE * (LIGHT_CHARACTERS // len(PAGE) + 1)
WAIT_S = 60.0


class Conversions:
    """In place of conversions that last until `finish`, or until they are cancelled."""

    def __init__(self) -> None:
        self.began, self.cancelled = threading.Semaphore(0), threading.Semaphore(0)
        self._finished, self._ends = False, list[threading.Event]()

    def __call__(self, name: str, file_name: str, data: bytes, cancellation: Cancellation) -> Any:
        end = threading.Event()
        self._ends.append(end)
        self.began.release()
        try:
            with cancellation.ended_by(end.set):
                assert self._finished or end.wait(WAIT_S)
                cancellation.check()
        except Cancelled:
            self.cancelled.release()
            raise
        return self.convert(name, file_name, data, cancellation)

    convert = staticmethod(document_routes.convert_bytes)

    def finish(self) -> None:
        self._finished = True
        for end in self._ends:
            end.set()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversions]:
    conversions = Conversions()
    monkeypatch.setattr(document_routes, "convert_bytes", conversions)
    yield conversions
    conversions.finish()


def put(server: Any, name: str, key: dict[str, str]) -> httpx.Response:
    headers = {"Content-Type": "text/html", **key}
    reply: httpx.Response = server.client.put(f"/v1/documents/{name}", content=HTML, headers=headers)
    return reply


@contextmanager
def in_background(*calls: Any) -> Iterator[list[Any]]:
    """The calls run meanwhile; yields the list of their results."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda call=call: results.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(WAIT_S)


def leave_after(server: Any, path: str, body: bytes, media: str, began: threading.Semaphore) -> None:
    """Send a PUT by the store's own tenant, wait until its work has begun, and disconnect."""
    head = f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.client.base_url.port)) as connection:
        connection.sendall(f"{head}Authorization: Bearer {KEYS[0]}\r\n\r\n".encode() + body)
        assert began.acquire(timeout=WAIT_S)


def wait_until_idle(server: Any) -> None:
    while server.state.active:
        server.client.get("/health")


def test_others_are_answered_while_a_tenants_files_are_converted(start: Any, slow: Conversions) -> None:
    server = start(KEYS)
    with in_background(*[lambda i=i: put(server, f"{i}.html", ADA) for i in range(4)]) as replies:
        assert slow.began.acquire(timeout=WAIT_S)
        assert server.client.put("/v1/documents/a", json={"text": PAGE}, headers=BOB).status_code == 201
        for key in (ADA, BOB):  # also those of the same tenant
            for method, path, body in (
                ("POST", "/v1/search", {"query": "billing"}),
                ("GET", "/v1/documents", None),
                ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 2}),
            ):
                assert server.client.request(method, path, json=body, headers=key).status_code == 200
        assert not slow.began.acquire(blocking=False)  # one of a tenant at a time
        slow.finish()
        assert put(server, "own.html", BOB).status_code == 201
    assert [reply.status_code for reply in replies] == [201] * 4


def test_probes_are_answered_while_every_thread_is_busy(start: Any) -> None:
    server, go, began = start(), threading.Event(), threading.Semaphore(0)
    pools = server.state.pools
    for pool in (pools.light, pools.heavy, pools.writing):
        for tenant in ("ada", "bob"):
            pool.submit(tenant, lambda: (began.release(), go.wait(WAIT_S)))
    for _ in range(5):  # threads: two, two and one
        assert began.acquire(timeout=WAIT_S)
    assert [server.client.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
    go.set()


def test_a_conversion_ends_with_its_client(start: Any, slow: Conversions) -> None:
    server = start(KEYS)
    leave_after(server, "/v1/documents/a.html", HTML, "text/html", slow.began)
    assert slow.cancelled.acquire(timeout=WAIT_S)
    wait_until_idle(server)
    assert server.state.body_bytes == 0
    assert not server.state.pools.heavy._queues


def test_a_queued_upload_is_dropped_with_its_client(start: Any, slow: Conversions) -> None:
    server, queued = start(KEYS), threading.Semaphore(1)
    with in_background(lambda: put(server, "1.html", {"Authorization": f"Bearer {KEYS[0]}"})):
        assert slow.began.acquire(timeout=WAIT_S)
        leave_after(server, "/v1/documents/2.html", HTML, "text/html", queued)
        while server.state.active > 1:
            server.client.get("/health")
        slow.finish()
    assert [
        d["id"]
        for d in server.client.get("/v1/documents", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()["data"]
    ] == ["1.html"]
    assert not slow.began.acquire(blocking=False)


def test_the_process_of_a_conversion_is_killed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, found, began = start(KEYS), list[subprocess.Popen[bytes]](), threading.Semaphore(0)
    started = LimitedProcess._started

    def note(self: LimitedProcess) -> subprocess.Popen[bytes]:
        process = started(self)
        if "cacheblend_documents.conversion" in str(process.args):
            found.append(process)
            began.release()
        return process

    monkeypatch.setattr(LimitedProcess, "_started", note)
    leave_after(server, "/v1/documents/a.html", NESTED, "text/html", began)
    assert found[0].wait(WAIT_S) == -9
    wait_until_idle(server)


def test_cutting_ends_with_its_client(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that cuts a long text is killed."""
    server, began, stream = start(KEYS), threading.Semaphore(0), LimitedProcess.stream
    processes = list[subprocess.Popen[bytes] | None]()

    def stopped(self: LimitedProcess, *message: Any) -> Iterator[bytes]:
        os.kill(self._started().pid, signal.SIGSTOP)
        processes.append(self._process)
        began.release()
        try:
            yield from stream(self, *message)
        finally:
            processes.append(self._process)

    monkeypatch.setattr(LimitedProcess, "stream", stopped)
    body = httpx.Request("PUT", "http://a", json={"text": "\n\n".join([PAGE] * 3000)}).content
    leave_after(server, "/v1/documents/a", body, "application/json", began)
    wait_until_idle(server)
    first, last = processes
    assert first is not None
    assert last is None


def test_a_stopping_server_ends_conversions(start: Any, slow: Conversions) -> None:
    server = start(KEYS, grace_s=0)
    with suppress(httpx.TransportError), in_background(lambda: put(server, "a.html", ADA)) as replies:
        assert slow.began.acquire(timeout=WAIT_S)
        server.end()
        assert slow.cancelled.acquire(timeout=WAIT_S)
        server.thread.join(WAIT_S)
    assert not server.thread.is_alive()
    assert [reply.json()["error"]["code"] for reply in replies] == ["stopping"]


def test_a_put_that_is_being_stored_ends_with_its_client(start: Any) -> None:
    server, go, began = start(KEYS), threading.Event(), threading.Semaphore(0)
    between_steps = server.state.engine.service.between_steps
    between_steps(lambda: go.wait(WAIT_S))

    def note(work: Any) -> Any:
        began.release()
        return between_steps(work)

    server.state.engine.service.between_steps = note
    body = httpx.Request("PUT", "http://a", json={"text": PAGE}).content
    leave_after(server, "/v1/documents/a", body, "application/json", began)
    wait_until_idle(server)
    go.set()
    between_steps(lambda: None).result(WAIT_S)
    own = {"Authorization": f"Bearer {KEYS[0]}"}
    assert server.client.get("/v1/documents", headers=own).json()["data"] == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", {"input": ["a", " " * 200_000]}, 400),
        ("/api/embed", {"model": "wordllama", "input": " " * 200_000, "truncate": False}, 400),
        ("/api/embed", {"model": "wordllama", "input": "a " * 100_000}, 200),
        ("/api/embeddings", {"model": "wordllama", "prompt": "a " * 100_000}, 200),
    ],
)
def test_texts_to_embed_are_measured_before_they_are_tokenised(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], status: int
) -> None:
    lengths: list[int] = []
    num_tokens = Embedder.num_tokens
    monkeypatch.setattr(
        Embedder, "num_tokens", lambda self, texts: lengths.extend(map(len, texts)) or num_tokens(self, texts)
    )
    reply = server.client.post(path, json=body)
    assert reply.status_code == status
    assert lengths == ([] if status == 400 else [64 * 2048])
    if status == 400:
        error = reply.json() if path.startswith("/api") else reply.json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_texts_are_embedded_in_slices_of_few_characters() -> None:
    texts = ["a" * 40_000] * 3 + ["b"] * 150 + ["c" * 100_000, "d"]
    slices = [(len(part), sum(map(len, part))) for part in embedding_routes._slices(texts)]
    assert slices == [(1, 40_000), (1, 40_000), (64, 40_063), (64, 64), (23, 23), (1, 100_000), (1, 1)]
    assert list(embedding_routes._slices([])) == []


def test_long_texts_of_a_chat_leave_the_light_threads_alone(start: Any) -> None:
    server = start()
    light, heavy = server.state.pools.for_text(LIGHT_CHARACTERS), server.state.pools.for_text(LIGHT_CHARACTERS + 1)
    assert (light, heavy) == (server.state.pools.light, server.state.pools.heavy)
    submitted: list[str] = []
    submit = heavy.submit
    heavy.submit = lambda tenant, work: submitted.append(tenant) or submit(tenant, work)
    assert server.ask(documents=[{"text": LONG}]).status_code == 400  # too long for the model, too
    assert server.ask(documents=[{"text": PAGE}]).status_code == 200
    assert submitted == [""]


@pytest.mark.parametrize("name", ["a" * 300_000, "` - at `$x`" * 30_000], ids=["long", "like an error"])
def test_long_names_of_fields_are_cut_in_errors(server: Any, name: str) -> None:
    reply = server.ask(**{name: 1})
    assert (reply.status_code, len(reply.text) < 2000) == (400, True)
    assert server.ask(blend={"selector": "a" * 300_000}).status_code == 400
