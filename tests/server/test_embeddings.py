"""Embeddings over HTTP: the vectors that search by meaning uses, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from cacheblend_cli.corpus.embedding import find_embedder
from cacheblend_cli.server import embedding_routes

TEXTS = ["a cat sleeps", "a dog barks", "the tax on income"]
pytestmark = pytest.mark.skipif(find_spec("wordllama") is None, reason="needs the weights of wordllama")


@pytest.fixture
def client(server: Any) -> Any:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_the_client_of_openai(client: Any) -> None:
    import openai

    own = find_embedder()
    assert own is not None
    reply = client.embeddings.create(model="wordllama", input=TEXTS)  # base64, which the client decodes
    np.testing.assert_array_equal(np.array([d.embedding for d in reply.data], np.float32), own.embed(TEXTS))
    assert [d.index for d in reply.data] == [0, 1, 2]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(own.num_tokens(TEXTS)) > 6
    floats = client.embeddings.create(model="cacheblend", input=TEXTS[0], encoding_format="float")
    np.testing.assert_array_equal(np.float32(floats.data[0].embedding), own.embed(TEXTS[:1])[0])
    short = np.float32(client.embeddings.create(model="wordllama", input=TEXTS[0], dimensions=64).data[0].embedding)
    assert (short.shape, float(np.linalg.norm(short))) == ((64,), pytest.approx(1))
    np.testing.assert_allclose(short / short[0], own.embed(TEXTS[:1])[0][:64] / own.embed(TEXTS[:1])[0][0], rtol=1e-5)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": [1, 2, 3]}, "input"),
        ({"input": [[1, 2], [3]]}, "input"),
        ({"input": "a", "dimensions": 257}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a"] * (embedding_routes.MAX_TEXTS + 1)}, "input"),
        ({"input": "a b " * 2000}, "input"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_embedded_is_refused(shared: Any, body: dict[str, Any], param: str) -> None:
    reply = shared.client.post("/v1/embeddings", json={"model": "wordllama", **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_client_that_sends_token_ids_is_told_what_to_set(shared: Any) -> None:
    reply = shared.client.post("/v1/embeddings", json={"input": [[1, 2, 3]]})
    assert "check_embedding_ctx_length=False" in reply.json()["error"]["message"]


def test_many_texts_are_embedded_as_one_by_one(server: Any) -> None:
    texts = [f"text number {i} about {word}" for i in range(60) for word in ("cats", "taxes", "zzzzzz")]
    data = server.client.post("/v1/embeddings", json={"input": texts}).json()["data"]
    own = find_embedder()
    assert own is not None
    np.testing.assert_array_equal(
        np.float32([d["embedding"] for d in data]), np.concatenate([own.embed([t]) for t in texts])
    )


def test_ollamas_routes(server: Any) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=str(server.client.base_url))
    openai = server.client.post("/v1/embeddings", json={"input": TEXTS}).json()
    reply = client.embed("wordllama", input=TEXTS)
    assert reply.embeddings == [d["embedding"] for d in openai["data"]]
    assert reply.prompt_eval_count == openai["usage"]["prompt_tokens"]
    assert client.embeddings("wordllama:latest", prompt=TEXTS[0]).embedding == reply.embeddings[0]
    assert client.embed("wordllama", input=[]).embeddings == client.embed("wordllama", input="").embeddings == []
    assert len(client.embed("wordllama", input="a", dimensions=64).embeddings[0]) == 64
    assert client.embed("wordllama", input="a b " * 2000).prompt_eval_count == 2048
    with pytest.raises(ollama.ResponseError) as refused:
        client.embed("wordllama", input="a b " * 2000, truncate=False)
    assert refused.value.status_code == 400
    assert [m.model for m in client.list().models] == ["tiny:latest"]  # clients offer all of them for chats


def test_without_weights(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_routes, "find_embedder", lambda name: None)
    reply = server.client.post("/v1/embeddings", json={"input": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "embeddings_not_installed")
    assert len(server.client.get("/api/tags").json()["models"]) == 1


def test_weights_that_are_gone_are_a_clear_error(server: Any) -> None:
    server.state.settings = server.state.settings.__class__(**{**vars(server.state.settings), "embeddings": "/no/such"})
    reply = server.client.post("/v1/embeddings", json={"input": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "embeddings_not_installed")
    assert "/no" not in reply.text
    assert len(server.client.get("/api/tags").json()["models"]) == 1


def test_the_engine_has_no_part_in_it(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(server.state.engine.service, "between_steps", refuse)
    monkeypatch.setattr(server.state.engine.service, "submit", refuse)
    assert server.client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_a_full_queue_refuses_texts(start: Any) -> None:
    from cacheblend_cli.engine.async_engine import Limits

    server = start(limits=Limits(max_waiting=1))
    server.state._preparing = 1
    reply = server.client.post("/v1/embeddings", json={"input": "a"})
    assert (reply.status_code, "retry-after" in reply.headers) == (429, True)
    server.state._preparing = 0
