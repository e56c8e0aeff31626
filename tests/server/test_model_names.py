"""Names of the model in requests: without and with Ollama's tag."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "cacheblend", "cacheblend:latest"])
def test_a_model_is_found_with_a_tag_and_the_answer_has_the_name_asked_for(server: Any, name: str) -> None:
    assert server.ask(model=name).json()["model"] == name
    body = {"model": name, "prompt": "a", "max_tokens": 1}
    assert server.client.post("/v1/completions", json=body).json()["model"] == name
    assert server.client.get(f"/v1/models/{name}").json()["id"] == name
    streamed = server.client.post("/v1/completions", json=body | {"stream": True}).text
    assert f'"model":"{name}"' in streamed.replace(": ", ":", 1).replace('"model": "', '"model":"')


def test_an_answer_to_a_request_without_a_model_has_the_servers(server: Any) -> None:
    assert server.ask().json()["model"] == "tiny"
    assert server.ask(model="").json()["model"] == "tiny"


@pytest.mark.parametrize("name", ["tiny:7b", "tiny:", ":latest", "other:latest", "tiny:latest:latest"])
def test_other_tags_and_names_are_not_found(server: Any, name: str) -> None:
    assert server.ask(model=name).status_code == 404
    assert server.client.get(f"/v1/models/{name}").status_code == 404


def test_embeddings_are_found_with_a_tag(server: Any) -> None:
    for name in ("wordllama", "wordllama:latest"):
        reply = server.client.post("/v1/embeddings", json={"model": name, "input": "a cat"})
        assert reply.json().get("model") == name or reply.json()["error"]["code"] == "embeddings_not_installed"
    assert server.client.post("/v1/embeddings", json={"model": "tiny:latest", "input": "a"}).status_code == 404
