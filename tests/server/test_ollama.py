"""Ollama's API: its Python client, a program that speaks nothing else, and the same answers as those of /v1."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cacheblend_cli.server.api_errors import ApiError
from cacheblend_cli.server.bodies import parse
from cacheblend_cli.server.ollama.protocol import GenerateBody, OllamaChatBody, OptionsIn

ASKED = [{"role": "user", "content": "who works in Bergen?"}]
PAGES = [{"id": "a", "text": "the lead of billing is Mara"}, {"id": "b", "text": "Jonas keeps a parrot at home"}]
KEYS = ("plain-key-0000", "ada:ada-key-000000")


def post(server: Any, path: str, key: str = "", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return server.client.post(f"/api/{path}", json=body, headers=headers)


@pytest.fixture
def client(server: Any) -> Any:
    ollama = pytest.importorskip("ollama")
    return ollama.Client(host=str(server.client.base_url))


def test_the_client_of_ollama(client: Any, server: Any) -> None:
    import ollama

    assert client.list().models[0].model == "tiny:latest"
    assert [(m.model, m.context_length) for m in client.ps().models] == [("tiny:latest", 1024)]
    shown = client.show("tiny")
    assert (shown.capabilities, shown.modelinfo["qwen2.context_length"]) == (["completion"], 1024)
    asked = {
        "model": "tiny:latest",
        "messages": ASKED,
        "options": {"num_predict": 6, "num_ctx": 4096},
        "keep_alive": "5m",
    }
    whole = client.chat(**asked)
    assert (whole.done, whole.eval_count) == (True, 6)
    assert whole.done_reason == "length"
    assert min(whole.total_duration, whole.prompt_eval_duration, whole.eval_duration) > 0
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count
    openai = server.ask(messages=ASKED, max_tokens=6).json()
    assert openai["choices"][0]["message"]["content"] == whole.message.content
    assert openai["usage"]["prompt_tokens"] == whole.prompt_eval_count
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat("llama3", messages=ASKED)
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as refused:
        list(client.chat("tiny", messages=[{"role": "user", "content": "Mara " * 2000}], stream=True))
    assert refused.value.status_code == 400


def test_generate(client: Any, server: Any) -> None:
    options = {"num_predict": 4}
    given = client.generate("tiny", prompt="who?", system="Be kind.", options=options)
    chatted = client.chat(
        "tiny",
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "who?"}],
        options=options,
    )
    assert given.response == chatted.message.content
    assert given.prompt_eval_count == chatted.prompt_eval_count
    raw = client.generate("tiny", prompt="the lead of", raw=True, options=options)
    completed = server.client.post("/v1/completions", json={"prompt": "the lead of", "max_tokens": 4}).json()
    assert raw.response == completed["choices"][0]["text"]
    parts = list(client.generate("tiny", prompt="who?", options=options, stream=True, logprobs=True, top_logprobs=2))
    tokens = [token for part in parts for token in part.logprobs or ()]
    assert len(tokens) == 4
    assert {len(token.top_logprobs) for token in tokens} == {2}
    assert [client.generate("tiny").done_reason, client.chat("tiny").done_reason] == ["load", "load"]


def test_answers_of_a_form(client: Any) -> None:
    pytest.importorskip("llguidance")
    reply = client.chat("tiny", messages=ASKED, format={"enum": ["yes", "no"]}, options={"num_predict": 40})
    assert json.loads(reply.message.content) in ("yes", "no")
    assert client.generate("tiny", prompt="x", format="json", options={"num_predict": 8}).response.lstrip()[0] == "{"


def test_langchain_ollama(server: Any) -> None:
    """It has no other protocol than Ollama's."""
    chat = pytest.importorskip("langchain_ollama").ChatOllama
    made = chat(
        model="tiny", base_url=str(server.client.base_url), temperature=0, num_predict=4, validate_model_on_init=True
    )
    said = [("system", "Be kind."), ("human", "who leads billing?")]
    reply = made.invoke(said)
    assert "".join(str(part.content) for part in made.stream(said)) == reply.content
    assert reply.usage_metadata["output_tokens"] <= 4


def test_a_stream_is_json_lines(server: Any) -> None:
    body = json.dumps({"model": "tiny", "messages": ASKED, "documents": PAGES, "options": {"num_predict": 3}})
    reply = server.client.post("/api/chat", content=body)  # without a content type, as curl -d does it
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    records = [json.loads(line) for line in reply.text.splitlines()]
    assert {record["model"] for record in records} == {"tiny"}
    assert [c["document"] for c in records[-1]["blend"]["chunks"]] == ["a", "b"]
    other_site = server.client.post("/api/chat", content=body, headers={"origin": "http://other.example"})
    assert other_site.status_code == 403
    extension = server.client.post("/api/chat", content=body, headers={"origin": "app://notes"})
    assert extension.status_code == 415  # JSON, but not said to be


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages.0.images"),
        ("chat", {"messages": [*ASKED, {"role": "tool", "tool_name": "f", "content": "3"}]}, "messages.1.role"),
        ("chat", {"messages": ASKED, "think": True}, "think"),
        ("chat", {"messages": ASKED, "think": "high"}, "think"),
        ("chat", {"messages": ASKED, "format": "xml"}, "format"),
        ("chat", {"messages": ASKED, "options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"messages": ASKED, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("chat", {"messages": ASKED, "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": ASKED, "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ("chat", {"messages": ASKED, "options": {"num_gqa": 8}}, "options.num_gqa"),
        ("chat", {"messages": ASKED, "colour": 1}, "colour"),
        ("generate", {"prompt": "a", "images": ["aa"]}, "images"),
        ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "a", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(shared: Any, path: str, body: dict[str, Any], param: str) -> None:
    reply = post(shared, path, model="tiny", **body)
    assert (reply.status_code, reply.json()["param"]) == (400, param), reply.text
    assert isinstance(reply.json()["error"], str)


def test_tools_are_not_called_and_not_claimed(server: Any) -> None:
    tools = [{"type": "function", "function": {"name": "get_time", "description": "The time."}}]
    plain, told = (
        post(server, "chat", model="tiny", messages=ASKED, stream=False, **t).json() for t in ({}, {"tools": tools})
    )
    assert told["message"] == plain["message"]
    assert told["prompt_eval_count"] == plain["prompt_eval_count"]
    assert "tools" in told["blend"]["notes"][-1]
    assert "tools" not in post(server, "show", model="tiny").json()["capabilities"]


def test_values_that_change_nothing_are_accepted() -> None:
    options = OptionsIn(
        mirostat=0, typical_p=1.0, tfs_z=1.0, repeat_last_n=64, mirostat_tau=5.0, penalize_newline=False
    )
    options.check()
    for text in ("5m", "-1", "1h30m", "0", "2.5s"):
        parse(OllamaChatBody, b'{"model": "m", "messages": [], "keep_alive": "%s"}' % text.encode()).ask_body()
    body = parse(
        GenerateBody,
        b'{"model": "m", "prompt": "a", "images": [], "suffix": "", "context": null, "format": "", "options": null}',
    )
    assert body.ask_body().stream is True
    with pytest.raises(ApiError):
        OptionsIn(repeat_penalty=1.1, repeat_last_n=0).check()


def test_thinking(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_cli.prompt.template import PromptTemplate

    server = start()
    monkeypatch.setattr(PromptTemplate, "may_reason", property(lambda self: True))
    told = post(server, "show", model="tiny").json()
    assert told["capabilities"] == ["completion", "thinking"]
    submitted: list[Any] = []
    submit = server.state.engine.service.submit
    monkeypatch.setattr(
        server.state.engine.service, "submit", lambda made, tell: submitted.append(made) or submit(made, tell)
    )
    for think in (True, False, None):
        assert post(server, "chat", model="tiny", messages=ASKED, think=think).status_code == 200
    assert [made.sampling.reasoning_tokens for made in submitted] == [None, 0, None]


def test_keys_and_limits(start: Any) -> None:
    server = start(KEYS, max_body=2000)
    refused = post(server, "chat", model="tiny", messages=ASKED)
    assert (refused.status_code, refused.json()["code"]) == (401, "invalid_api_key")
    assert server.client.get("/api/tags").status_code == 401
    body = {"model": "tiny", "messages": ASKED, "documents": PAGES, "stream": False, "options": {"num_predict": 2}}
    [ours, theirs] = [post(server, "chat", key.rpartition(":")[2], **body).json()["blend"]["chunks"] for key in KEYS]
    assert {c["id"] for c in ours}.isdisjoint(c["id"] for c in theirs)
    large = post(server, "chat", KEYS[0], model="tiny", messages=[{"role": "user", "content": "a" * 3000}])
    assert (large.status_code, large.json()["code"]) == (413, "body_too_large")
    assert 'route="/api/chat",status="200"' in server.client.get("/metrics").text
    server.state.draining = True
    assert post(server, "chat", KEYS[0], **body).json()["code"] == "stopping"


def test_unknown_routes_answer_in_the_form_of_their_api(server: Any) -> None:
    assert isinstance(post(server, "pull", model="tiny").json()["error"], str)
    assert isinstance(server.client.get("/v1/nothing").json()["error"], dict)
    assert server.client.head("/").status_code == 200


def test_a_damaged_stream_ends_with_an_error_line(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_cli.server.ollama.routes import OllamaResponse

    def fail(*_: object) -> None:
        raise RuntimeError("of a test")

    monkeypatch.setattr(OllamaResponse, "_last", fail)
    lines = post(server, "chat", model="tiny", messages=ASKED, options={"num_predict": 2}).text.splitlines()
    assert set(json.loads(lines[-1])) == {"error", "param", "code"}


def test_a_client_that_leaves_a_stream_is_cancelled(server: Any) -> None:
    body = {"model": "tiny", "messages": ASKED, "options": {"num_predict": 900, "temperature": 3, "seed": 1}}
    with server.client.stream("POST", "/api/chat", json=body) as reply:
        next(reply.iter_lines())
    for _ in range(200):
        if server.state.engine.service.stats().cancelled:
            break
        server.client.get("/health")
    assert server.state.engine.service.stats().cancelled == 1
