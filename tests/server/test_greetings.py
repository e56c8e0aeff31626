"""Conversations that begin with the assistant, as those of clients with a greeting do."""

from __future__ import annotations

from typing import Any

HELLO = {"role": "assistant", "content": "Hello! How can I help?"}
WHO = {"role": "user", "content": "who works in Bergen?"}
PAGE = {"id": "team", "text": "Mara Lind works in Bergen."}


def greeted_notes(blend: dict[str, Any]) -> list[str]:
    return [note for note in blend["notes"] if "begins with the assistant" in note]


def test_a_greeting_comes_after_an_empty_user_message(server: Any, engine: Any) -> None:
    reply = server.ask(messages=[HELLO, WHO]).json()
    plain = server.ask(messages=[{"role": "user", "content": " "}, HELLO, WHO]).json()
    assert reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert reply["choices"][0]["message"] == plain["choices"][0]["message"]
    assert (len(greeted_notes(reply["blend"])), len(greeted_notes(plain["blend"]))) == (1, 0)
    body = {"model": "tiny", "messages": [HELLO, WHO], "stream": False}
    ollama = server.client.post("/api/chat", json=body).json()
    assert ollama["message"]["content"]
    assert len(greeted_notes(ollama["blend"])) == 1


def test_stored_chunks_are_exact_with_and_without_a_greeting(server: Any) -> None:
    """The greeting comes after the chunks, so the prefix of their KV is the same."""
    server.ask(messages=[WHO], documents=[PAGE])
    system = {"role": "system", "content": "Answer briefly."}
    for messages in ([HELLO, WHO], [HELLO, HELLO, WHO], [HELLO, WHO, HELLO, WHO]):
        [chunk] = server.ask(messages=messages, documents=[PAGE]).json()["blend"]["chunks"]
        assert chunk["status"] == "exact"
    assert server.ask(messages=[system, HELLO, WHO], documents=[PAGE]).status_code == 200


def test_the_next_turn_continues_the_prompt(server: Any) -> None:
    server.ask(messages=[HELLO, WHO])
    turns = [HELLO, WHO, {"role": "assistant", "content": "Mara"}, {"role": "user", "content": "and in Oslo?"}]
    assert server.ask(messages=turns).status_code == 200


def test_a_greeting_is_no_reason_to_search(start: Any) -> None:
    server = start(retrieve=True)
    assert server.client.put("/v1/documents/team", json={"text": PAGE["text"]}).status_code in (200, 201)
    assert server.ask(messages=[HELLO, {"role": "user", "content": "what can you do?"}]).json()["blend"]["chunks"] == []
    [chunk] = server.ask(messages=[HELLO, WHO]).json()["blend"]["chunks"]
    assert chunk["document"] == "team"


def test_a_conversation_ends_with_the_user(server: Any) -> None:
    for messages in ([HELLO], [WHO, HELLO], [HELLO, WHO, HELLO]):
        reply = server.ask(messages=messages)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
