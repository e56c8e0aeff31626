"""Claims over HTTP: in `blend`, and what `on_unsupported` does with them. A text that may still change is held back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

BODY = {
    "messages": [{"role": "user", "content": "who keeps a parrot?"}],
    "documents": [{"text": "Jonas Berg keeps a parrot at home near the harbor of Bergen."}] * 2,
    "regex": "Jonas Borg keeps 54 parrots",
    "max_tokens": 60,
    "stream": True,
}


def asked(server: Any, on_unsupported: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the status, and the objects of the stream, or the error."""
    server.state.settings = replace(server.state.settings, on_unsupported=on_unsupported)
    reply = server.client.post("/v1/chat/completions", json=BODY)
    if reply.status_code != 200:
        return reply.status_code, [reply.json()["error"]]
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return reply.status_code, [json.loads(line) for line in lines]


@pytest.mark.parametrize("on_unsupported", ["answer", "confirm"])
def test_a_stream_has_claims_at_its_end(server: Any, on_unsupported: str) -> None:
    _, objects = asked(server, on_unsupported)
    deltas = [object["choices"][0]["delta"].get("content") for object in objects]
    pieces = [piece for piece in deltas if piece]
    assert "".join(pieces) == BODY["regex"]
    blend = objects[-1]["blend"]
    assert [(c["text"], c["found"]) for c in blend["claims"]] == [("Jonas Borg", False), ("54", False)]
    if on_unsupported == "answer":
        assert len(pieces) > 1
        assert "confirm" not in blend
    else:
        assert len(pieces) == 1  # a client could not take a draft back
        assert blend["confirm"]["confirmed"] is True


def test_an_unsupported_answer_is_an_error(server: Any) -> None:
    status, [error] = asked(server, "refuse")
    assert (status, error["code"]) == (404, "unsupported_claims")
    assert error["message"] == 'the answer is withheld: not in the sources: "Jonas Borg", 54'
