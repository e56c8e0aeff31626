"""Preparing requests: beside the engine's thread, checked before texts are read, and nothing is stored of what is
refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cacheblend_store import ChunkStore, StoreNoSpace

from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.texts import Putting, document_of, put_name
from cacheblend_cli.corpus.search import WEAK
from cacheblend_cli.engine.async_engine import Limits
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.server.document_routes import count_documents

PAGE = "the lead of billing is Mara and she works in Bergen"
WAIT_S = 60.0


def num_chunks(server: Any) -> int:
    with server.state.store.read() as reader:
        return int(reader.entries("chunks"))


@contextmanager
def held(server: Any) -> Iterator[None]:
    """The engine's thread is busy meanwhile."""
    go, began = threading.Event(), threading.Event()
    server.state.engine.service.between_steps(lambda: (began.set(), go.wait(WAIT_S)))
    assert began.wait(WAIT_S)
    try:
        yield
    finally:
        go.set()


def no_space(path: object, *_: object) -> None:
    raise StoreNoSpace(f"the disk of {path} has 64 MiB free; 65 MiB are needed", "free some space")


def test_requests_are_prepared_while_the_engine_is_busy(server: Any) -> None:
    assert server.client.put("/v1/documents/a", json={"text": PAGE}).status_code == 201
    with held(server):
        [hit] = server.client.post("/v1/search", json={"query": "billing"}).json()["data"]
        [listed] = server.client.get("/v1/documents").json()["data"]
        assert (hit["document"], listed["id"]) == ("a", "a")
        for wrong in ({"chunks": ["ffff"]}, {"search": {"query": "zebra"}}, {"blend": {"selector": "magic"}}):
            assert server.ask(**wrong).status_code in (400, 404)
        assert server.ask(documents=[{"text": PAGE * 300}]).status_code == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"documents": [{"text": " ".join([PAGE] * 150)}]},
        {"max_tokens": 1024},
        {"blend": {"selector": "hkvd", "check_layer": 99}},
        {"timeout_s": -1},
        {"messages": [{"role": "user", "content": " "}]},
        {"chunks": ["ffff"]},
        {"search": {"query": "zebra"}},
    ],
)
def test_nothing_is_stored_of_a_refused_request(shared: Any, wrong: dict[str, Any]) -> None:
    refused = shared.ask(**{"documents": [{"text": PAGE}], **wrong})
    assert refused.status_code in (400, 404), refused.text
    assert num_chunks(shared) == 0


@pytest.mark.parametrize("field", ["question", "documents", "history", "system"])
def test_lengths_are_checked_before_texts_are_read(server: Any, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any) -> Any:
        raise AssertionError("a text was tokenised")

    long, turns = "billing " * 100_000, [("user", "who?")]
    turns = {
        "question": [("user", long)],
        "history": [("user", long), ("assistant", "Mara"), ("user", "who?")],
        "system": [("system", long), *turns],
    }.get(field, turns)
    for name in ("encode_text", "encode_template", "encode_template_rest", "holds_control", "special_in"):
        monkeypatch.setattr(Tokenizer, name, encode)
    refused = server.ask(
        messages=[{"role": role, "content": text} for role, text in turns],
        documents=[{"text": long if field == "documents" else PAGE}],
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_full_queue_refuses_before_anything_is_prepared(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(limits=Limits(max_waiting=1))
    go, began = threading.Event(), threading.Event()

    def sent(*_: Any) -> Any:
        began.set()
        assert go.wait(WAIT_S)
        raise AssertionError("no second request is prepared")

    monkeypatch.setattr("cacheblend_cli.collect.texts.sent_document", sent)
    first = threading.Thread(target=lambda: server.ask(documents=[{"text": PAGE}]))
    first.start()
    assert began.wait(WAIT_S)
    refused = server.ask(documents=[{"text": PAGE}])
    assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    go.set()
    first.join()


def test_a_full_disk_does_not_fail_an_answer(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = server.ask(documents=[{"text": PAGE}], blend={"mode": "full"}).json()["choices"][0]["message"]
    monkeypatch.setattr("cacheblend_store.store.check_space", no_space)
    answered = server.ask(documents=[{"text": PAGE}])
    assert (answered.status_code, answered.json()["choices"][0]["message"]) == (200, expected)
    assert any("could not be stored" in note for note in answered.json()["blend"]["notes"])
    assert str(server.state.store.path) not in answered.text
    assert num_chunks(server) == 0


def test_a_title_is_kept(server: Any) -> None:
    put = server.client.put("/v1/documents/a", json={"text": PAGE, "title": "The billing team"})
    assert put.json()["title"] == "The billing team"
    [listed] = server.client.get("/v1/documents").json()["data"]
    [hit] = server.client.post("/v1/search", json={"query": "Mara"}).json()["data"]
    [chunk] = server.ask(search={"query": "Mara"}).json()["blend"]["chunks"]
    assert [found["title"] for found in (listed, hit, chunk)] == ["The billing team"] * 3
    server.client.put("/v1/documents/a", json={"text": f"# The billing team\n\n{PAGE}"})
    [listed] = server.client.get("/v1/documents").json()["data"]
    assert listed["title"] == "a"


def test_a_refused_put_changes_nothing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.client.put("/v1/documents/old", json={"text": "Jonas keeps a parrot at home"})
    before = num_chunks(server)
    with monkeypatch.context() as patched:
        patched.setattr("cacheblend_store.store.check_space", no_space)
        for name in ("new", "old"):
            refused = server.client.put(f"/v1/documents/{name}", json={"text": PAGE})
            assert (refused.status_code, str(server.state.store.path) in refused.text) == (503, False)
    [listed] = server.client.get("/v1/documents").json()["data"]
    assert (listed["id"], num_chunks(server)) == ("old", before)
    assert server.client.post("/v1/search", json={"query": "billing"}).json()["data"] == []
    [hit] = server.client.post("/v1/search", json={"query": "parrot"}).json()["data"]
    assert hit["document"] == "old"


def test_a_put_that_fails_late_leaves_no_chunk(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkStore, "put_documents", no_space)
    assert server.client.put("/v1/documents/new", json={"text": " ".join([PAGE] * 12)}).status_code == 503
    assert server.client.get("/v1/documents").json()["data"] == []
    assert num_chunks(server) == 1  # the prompt's prefix


def test_a_killed_put_is_not_found(server: Any, engine: Engine) -> None:
    state = server.state
    document = document_of(put_name("", "new"), PAGE, None)
    putting = Putting(engine.runtime.collection(), state.store, document, CollectSettings())
    while state.engine.service.between_steps(lambda: putting.collect()).result(WAIT_S):
        pass
    assert server.client.post("/v1/search", json={"query": "billing"}).json()["data"] == []
    putting.commit()
    assert len(server.client.post("/v1/search", json={"query": "billing"}).json()["data"]) == 1


def test_retrieval_for_chats_that_bring_nothing(start: Any) -> None:
    server, plain = start(retrieve=True), start()
    for one in (server, plain):
        one.client.put("/v1/documents/a", json={"text": PAGE})
        one.client.put("/v1/documents/b", json={"text": "Jonas keeps a parrot at home"})
    asked = [{"role": "user", "content": "where is the parrot?"}]
    [chunk] = server.ask(messages=asked).json()["blend"]["chunks"]
    assert chunk["document"] == "b"
    searched = plain.ask(messages=asked, search={}).json()
    found = server.ask(messages=asked).text.replace(str(server.client.base_url), str(plain.client.base_url))
    assert json.loads(found)["choices"] == searched["choices"]
    assert [c["document"] for c in server.ask(search={"query": "billing", "k": 1}).json()["blend"]["chunks"]] == ["a"]
    turns = [*asked, {"role": "assistant", "content": "home"}, {"role": "user", "content": "whose parrot?"}]
    assert "b" in [c["document"] for c in server.ask(messages=turns).json()["blend"]["chunks"]]
    raw = {"prompt": "parrot", "max_tokens": 2}
    assert server.client.post("/v1/completions", json=raw).json()["blend"]["chunks"] == []


def test_retrieval_that_finds_nothing_leaves_the_question_as_it_is(start: Any) -> None:
    server, plain = start(retrieve=True), start()
    own = plain.ask().json()

    def is_plain(answer: dict[str, Any], num_notes: int) -> bool:
        same = (answer["choices"], answer["usage"]) == (own["choices"], own["usage"])
        return same and (len(answer["blend"]["notes"]), answer["blend"]["chunks"]) == (num_notes, [])

    assert is_plain(server.ask().json(), 0)  # nothing is stored
    server.client.put("/v1/documents/b", json={"text": "Jonas keeps a parrot at home and a cat in the garden"})
    assert is_plain(server.ask().json(), 1)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("hi", "nothing stored matches"),
        ("write a poem about the sea", "nothing stored matches"),
        ("what is the garden of a proof in logic?", WEAK),
    ],
)
def test_a_question_about_something_else_is_not_answered_from_the_documents(
    start: Any, question: str, reason: str
) -> None:
    """The last one has a word of a document: a weak match."""
    server = start(retrieve=True)
    server.client.put("/v1/documents/a", json={"text": PAGE})
    server.client.put("/v1/documents/b", json={"text": "Jonas keeps a parrot at home and a cat in the garden"})
    reply = server.ask(messages=[{"role": "user", "content": question}]).json()
    assert reply["blend"]["chunks"] == []
    assert reply["blend"]["notes"] == [f"{reason}: answered without documents"]


def test_an_inflected_question_and_one_in_a_long_message_are_answered_from_the_documents(start: Any) -> None:
    server = start(retrieve=True)
    server.client.put("/v1/documents/a", json={"text": "# Lager\n\nLagerschlüssel hat Ada"})
    server.client.put("/v1/documents/b", json={"text": "Kesseldruck: sechs Bar"})
    message = (
        "Hallo zusammen. Gestern war das Wetter am Hafen schön, und das Mittagessen schmeckte allen. {} Viele Grüße"
    )
    for text in ("Wer hat die Schlüssel des Lagers?", message.format("Wo liegt der Lagerschlüssel?")):
        reply = server.ask(messages=[{"role": "user", "content": text}]).json()
        assert "a" in [chunk["document"] for chunk in reply["blend"]["chunks"]]


def test_a_list_that_goes_on_beyond_k_is_said(start: Any) -> None:
    server = start(retrieve=True)
    for number in range(4):
        server.client.put(
            f"/v1/documents/{number}", json={"text": f"A ladder hangs beside the gate of depot {number}."}
        )
    asked = [{"role": "user", "content": "Which depots have a ladder beside the gate?"}]
    [note] = server.ask(messages=asked, search={"k": 2}).json()["blend"]["notes"]
    assert "-k 4" in note
    assert server.ask(messages=asked, search={"k": 4}).json()["blend"]["notes"] == []


def test_a_document_can_be_its_text_alone(start: Any) -> None:
    server = start()
    texts, objects = (server.ask(documents=given).json() for given in ([PAGE], [{"text": PAGE}]))
    assert [chunk["id"] for chunk in texts["blend"]["chunks"]] == [chunk["id"] for chunk in objects["blend"]["chunks"]]
    assert texts["choices"][0]["message"]["content"] == objects["choices"][0]["message"]["content"]


def test_a_question_of_stop_words_is_not_searched(start: Any) -> None:
    """They are in every document. After another question they stand for its words."""
    server = start(retrieve=True)
    server.client.put("/v1/documents/a", json={"text": f"{PAGE}; what she can do is what you can do"})
    turns = [{"role": "user", "content": "what can you do?"}]
    assert server.ask(messages=turns).json()["blend"]["chunks"] == []
    before = [{"role": "user", "content": "who leads billing?"}, {"role": "assistant", "content": "Mara"}]
    assert server.ask(messages=[*before, *turns]).json()["blend"]["chunks"]


def test_nothing_found_for_a_chat_reads_no_chunk(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason needs a pass over all chunks, so it is only given for a requested search."""
    server = start(retrieve=True)
    server.client.put("/v1/documents/a", json={"text": PAGE})

    def chunks(*_: Any, **__: Any) -> Any:
        raise AssertionError("all chunks were read")

    monkeypatch.setattr(ChunkStore, "chunks", chunks)
    assert server.ask(messages=[{"role": "user", "content": "hi"}]).status_code == 200


@pytest.mark.parametrize(("search", "documents"), [(True, ["a"]), ({}, ["a"]), (None, []), (False, [])])
@pytest.mark.parametrize("path", ["v1/chat/completions", "api/chat"])
def test_search_is_also_a_boolean(start: Any, path: str, search: Any, documents: list[str]) -> None:
    server = start()
    server.client.put("/v1/documents/a", json={"text": PAGE})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "who works in Bergen?"}], "stream": False}
    reply = server.client.post(f"/{path}", json={**body, "search": search})
    assert [chunk["document"] for chunk in reply.json()["blend"]["chunks"]] == documents


def test_no_search_in_a_server_that_retrieves(start: Any) -> None:
    server = start(retrieve=True)
    server.client.put("/v1/documents/a", json={"text": PAGE})
    assert [len(server.ask(search=wanted).json()["blend"]["chunks"]) for wanted in (None, False)] == [1, 0]


def test_retrieval_is_of_the_documents_of_a_tenant(start: Any) -> None:
    server = start(("ada:ada-key-000000", "bob:bob-key-000000"), retrieve=True)
    server.client.put("/v1/documents/a", json={"text": PAGE}, headers={"Authorization": "Bearer ada-key-000000"})
    blends = [server.ask(key).json()["blend"] for key in ("ada-key-000000", "bob-key-000000")]
    assert [len(blend["chunks"]) for blend in blends] == [1, 0]
    assert blends[1]["notes"] == []
    assert count_documents(server.state) == 1
