"""Chat and completions: OpenAI's form, documents beside it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answer_schema import problems
from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.search import WEAK
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import PLAIN, AskRequest, SamplingParams

PAGES = [
    {"id": "a", "title": "Billing", "text": "the lead of billing is Mara and she works in Bergen"},
    {"id": "b", "text": "Jonas keeps a parrot at home near the harbor"},
]
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": {"type": "object"}}}
]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_plain_question_is_the_models_own_answer(server: Any, engine: Engine) -> None:
    reply = server.ask().json()
    asked = AskRequest("who works in Bergen?", sampling=SamplingParams(max_tokens=4), prompt=PLAIN)
    answer = engine.run_alone(None, asked)
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer.text}
    assert choice["finish_reason"] == answer.finish_reason
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tiny"
    assert reply["usage"]["prompt_tokens"] == answer.prompt_tokens == len(answer.prompt_ids)
    assert reply["usage"]["completion_tokens"] == len(answer.generated_ids)


def test_documents_are_collected_once(server: Any) -> None:
    first = server.ask(documents=PAGES).json()
    assert [c["status"] for c in first["blend"]["chunks"]] == ["computed", "computed"]
    assert [(c["document"], c["title"]) for c in first["blend"]["chunks"]] == [("a", "Billing"), ("b", "")]
    again = server.ask(documents=PAGES).json()
    assert [c["status"] for c in again["blend"]["chunks"]] == ["exact", "blended"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= sum(
        c["tokens"] for c in again["blend"]["chunks"]
    )
    turned = server.ask(documents=PAGES[::-1], blend={"ratio": 1.0}).json()
    assert [c["status"] for c in turned["blend"]["chunks"]] == ["exact", "blended"]
    assert {c["id"] for c in turned["blend"]["chunks"]} == {c["id"] for c in first["blend"]["chunks"]}
    full = server.ask(documents=PAGES[::-1], blend={"mode": "full"}).json()
    assert turned["choices"][0]["message"] == full["choices"][0]["message"]
    found = server.client.post("/v1/search", json={"query": "parrot"}).json()
    assert found["data"] == []  # what came with a question is nobody else's


def test_a_stream_says_the_same(server: Any) -> None:
    server.ask(documents=PAGES)  # from here on they are stored
    whole = server.ask(documents=PAGES, n=2).json()
    parts = events(server.ask(documents=PAGES, n=2, stream=True, stream_options={"include_usage": True}).text)
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
    [blend] = [part["blend"] for part in parts if "blend" in part]
    assert len(blend["chunks"]) == 2


def test_turns_follow_the_documents(server: Any) -> None:
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": "Mara"},
        {"role": "user", "content": [{"type": "text", "text": "where?"}]},
    ]
    first = server.ask(messages=[turns[0], turns[1]], documents=PAGES).json()
    later = server.ask(messages=turns, documents=PAGES).json()
    assert [c["id"] for c in later["blend"]["chunks"]] == [c["id"] for c in first["blend"]["chunks"]]
    assert later["blend"]["chunks"][0]["status"] == "exact"
    assert later["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    other = server.ask(messages=turns[1:2], documents=PAGES).json()  # behind another system prompt is another KV
    assert other["blend"]["chunks"][0]["id"] != first["blend"]["chunks"][0]["id"]


def test_completions_go_on_without_a_template(server: Any, engine: Engine) -> None:
    body = {"prompt": ["the lead of", "Jonas keeps"], "max_tokens": 3, "logprobs": 2}
    reply = server.client.post("/v1/completions", json=body).json()
    tokenizer = engine.model.tokenizer
    assert reply["usage"]["prompt_tokens"] == sum(len(tokenizer.encode_text(p)) for p in body["prompt"])
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    tokens = reply["choices"][0]["logprobs"]
    assert len(tokens["tokens"]) == len(tokens["token_logprobs"]) == len(tokens["text_offset"])
    assert all(len(top) <= 2 for top in tokens["top_logprobs"])


def test_a_prompt_is_given_back_with_its_logprobs(server: Any, engine: Engine) -> None:
    """Like OpenAI's legacy API, for tools that evaluate models with it."""
    prompt = "the lead of billing is"
    ids = engine.model.tokenizer.encode_text(prompt)

    def complete(**body: Any) -> Any:
        reply = server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **body})
        return reply.json() if reply.status_code == 200 else reply

    plain = complete(logprobs=2)
    echoed = complete(logprobs=2, echo=True, n=2)
    for choice in echoed["choices"]:
        assert choice["text"] == prompt + plain["choices"][0]["text"]
        told, own = choice["logprobs"], plain["choices"][0]["logprobs"]
        assert told["tokens"][: len(ids)] == [engine.model.tokenizer.decode([i]) for i in ids]
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert all(value < 0 for value in told["token_logprobs"][1:])
        assert told["token_logprobs"][len(ids) :] == pytest.approx(own["token_logprobs"], abs=1e-4)
        assert all(choice["text"][at:].startswith(t) for at, t in zip(told["text_offset"], told["tokens"], strict=True))
        assert len(told["text_offset"]) == len(told["tokens"]) == len(ids) + len(own["tokens"])
    alone = complete(logprobs=2, echo=True, max_tokens=0)
    assert alone["choices"][0]["text"] == prompt
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == told["token_logprobs"][: len(ids)]
    assert alone["usage"]["completion_tokens"] == 0
    unasked = complete(echo=True)["choices"][0]
    assert (unasked["text"], unasked["logprobs"]) == (choice["text"], None)
    for refused in ({"max_tokens": 0}, {"echo": True, "stream": True}, {"echo": True, "documents": PAGES}):
        assert complete(**refused).status_code == 400, refused


def test_logprobs_of_a_chat(server: Any) -> None:
    reply = server.ask(logprobs=True, top_logprobs=3).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    for token in content:
        best = token["top_logprobs"][0]
        assert best["logprob"] == pytest.approx(token["logprob"])
        assert len(token["top_logprobs"]) == 3


def test_logprobs_are_streamed(server: Any, engine: Engine) -> None:
    token = engine.model.tokenizer.encode_text("x")[-1]
    for extra in ({}, {"logit_bias": {str(token): 100}, "stop": "xx"}, {"n": 2, "best_of": 3}):
        asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6, "temperature": 0.5, "seed": 3, **extra}
        whole = server.ask(**asked).json()
        parts = events(server.ask(**asked, stream=True).text)
        for choice in whole["choices"]:
            own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
            streamed = [token for c in own if c["logprobs"] for token in c["logprobs"]["content"]]
            assert [t["token"] for t in streamed] == [t["token"] for t in choice["logprobs"]["content"]]
            assert [t["logprob"] for t in streamed] == pytest.approx(
                [t["logprob"] for t in choice["logprobs"]["content"]]
            )
            assert all(len(t["top_logprobs"]) == 2 for t in streamed)
    body = {"prompt": "the lead of", "max_tokens": 5, "logprobs": 1}
    [choice] = server.client.post("/v1/completions", json=body).json()["choices"]
    parts = events(server.client.post("/v1/completions", json={**body, "stream": True}).text)
    told = [c["logprobs"] for part in parts for c in part["choices"] if c["logprobs"]]
    assert len(told) > 1
    for name in ("tokens", "text_offset"):
        assert [value for part in told for value in part[name]] == choice["logprobs"][name]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema"}),
        ("logit_bias", {"99999": 1}),
        ("reasoning_effort", "high"),
        ("temprature", 1),
        ("temperature", -1),
        ("temperature", "hot"),
        ("n", 0),
        ("stop", [""]),
        ("blend", {"mode": "magic"}),
        ("blend", {"rato": 1}),
        ("blend", {"ratio": "much"}),
        ("documents", [{"text": " "}]),
        ("documents", [{"txt": "a"}]),
        ("chunks", ["../../etc/passwd"]),
        ("model", "gpt-5"),
        ("messages", []),
        ("messages", [{"role": "assistant", "content": "hello"}]),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        ),
        ("messages", [{"role": "tool", "content": "3"}]),
        ("messages", [{"role": "user", "content": "a"}, {"role": "function", "name": "f", "content": "3"}]),
    ],
)
def test_what_cannot_be_done_is_refused(shared: Any, field: str, value: Any) -> None:
    for stream in (False, True):
        reply = shared.ask(**{field: value, "stream": stream})
        assert reply.status_code in (400, 404), reply.text
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": "NaN"},
        {"temperature": "1e999"},
        {"presence_penalty": "1e39"},
        {"frequency_penalty": "-1e39"},
        {"logit_bias": '{"5": 1e39}'},
        {"logit_bias": '{"99999999999999999999": 1}'},
        {"max_tokens": "9" * 4300},
        {"messages": '[{"role": "user", "content": "half \\ud800 a pair"}]'},
        {"\\ud800": "1"},
        {"metadata": "[" * 100_000 + "]" * 100_000},
        {"blend": '{"block": 100000000000000000000}'},
        {"blend": '{"selector": "first:99999999999999999999+query"}'},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_json_numbers_without_a_meaning_are_refused(shared: Any, changed: dict[str, str]) -> None:
    """Sends raw JSON, since clients do not create such bodies."""
    fields = {
        "messages": '[{"role": "user", "content": "who?"}]',
        "max_tokens": "2",
        "documents": json.dumps(PAGES),
        **changed,
    }
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    reply = shared.client.post(
        "/v1/chat/completions", content=body.encode(), headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_body_may_begin_with_a_mark_of_its_bytes_order(server: Any) -> None:
    body = b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "who?"}], "max_tokens": 1}'
    reply = server.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200


def test_a_time_that_was_over_before_is_told_as_such(server: Any) -> None:
    for stream in (False, True):
        reply = server.ask(timeout_s=1e-9, stream=stream)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")


def test_answers_have_a_form(server: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["ja", "nein"]}  # a random model fills all room that a form leaves it with white space
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for stream in (False, True):
        reply = server.ask(response_format=form, stream=stream, max_tokens=40)
        parts = events(reply.text) if stream else [reply.json()]
        choices = [c for part in parts for c in part["choices"]]
        text = "".join((c["delta"] if stream else c["message"]).get("content", "") for c in choices)
        assert json.loads(text) in ("ja", "nein")
    assert server.ask(regex="(ja|nein)", max_tokens=9).json()["choices"][0]["message"]["content"] in ("ja", "nein")


def test_a_token_is_forced_and_one_ends_the_answer(server: Any, engine: Engine) -> None:
    token = engine.model.tokenizer.encode_text("x")[-1]
    forced = server.ask(logit_bias={str(token): 100}, max_tokens=3).json()
    assert forced["choices"][0]["message"]["content"] == "xxx"
    ended = server.ask(logit_bias={str(token): 100}, stop_token_ids=[token], max_tokens=3).json()
    assert (ended["choices"][0]["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", 1)


def test_a_note_keeps_its_words(start: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a relative path of the store, its name is an ordinary word."""
    server = start()
    monkeypatch.setattr(server.state.store, "path", Path("store"))
    assert server.state.public("stored the KV of 2 chunks") == "stored the KV of 2 chunks"
    monkeypatch.setattr(server.state.store, "path", Path("/srv/kv/store"))
    assert "/srv" not in server.state.public("no room in /srv/kv/store")


def test_fields_without_effect_are_accepted(server: Any) -> None:
    reply = server.ask(
        user="me",
        metadata={"a": "b"},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        response_format={"type": "text"},
        logit_bias=None,
        store=True,
        service_tier="flex",
        safety_identifier="me",
        prompt_cache_key="a",
        prompt_cache_retention="24h",
        prompt_cache_options={"a": "b"},
        prediction={"type": "content", "content": "Mara"},
    )
    assert reply.status_code == 200
    assert reply.json()["blend"]["notes"] == []


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": TOOLS, "tool_choice": "none"},
        {"functions": [TOOLS[0]["function"]], "function_call": "auto"},
    ],
    ids=str,
)
def test_tools_do_not_change_the_answer(server: Any, more: dict[str, Any]) -> None:
    server.ask(documents=PAGES)  # from here on they are stored
    plain = server.ask(documents=PAGES).json()
    reply = server.ask(documents=PAGES, **more).json()
    assert reply["choices"] == plain["choices"]
    assert reply["usage"] == plain["usage"]
    assert [c["status"] for c in reply["blend"]["chunks"]] == [c["status"] for c in plain["blend"]["chunks"]]
    [note] = set(reply["blend"]["notes"]) - set(plain["blend"]["notes"])
    assert "tools" in note
    last = events(server.ask(documents=PAGES, stream=True, **more).text)[-1]
    assert note in last["blend"]["notes"]


def test_calls_of_tools_are_refused_with_advice(shared: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [{"role": "user", "content": "what time is it?"}]
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    for body, param, advice in (
        ({"messages": asked, "tools": TOOLS, "tool_choice": "required"}, "tool_choice", "auto or none"),
        ({"messages": [*asked, calling, result, *asked]}, "messages.1.tool_calls", "as text"),
        ({"messages": [*asked, result, *asked]}, "messages.1.role", "as text"),
    ):
        reply = shared.ask(**body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert advice in reply.json()["error"]["message"]


def test_too_long_is_told_in_numbers(server: Any) -> None:
    for stream in (False, True):
        reply = server.ask(messages=[{"role": "user", "content": "Mara " * 2000}], stream=stream)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "1024" in error["message"]
        assert "/" not in error["message"]  # the model's directory


def test_what_is_found_has_to_fit_beside_what_was_sent(server: Any) -> None:
    text = "Mara leads billing in Bergen. " * 8
    for i in range(9):
        server.client.put(f"/v1/documents/{i}", json={"text": f"Page {i}. {text}"})
    sent = [{"text": "Jonas keeps a parrot at home near the harbor. " * 45}]
    alone = server.ask(documents=sent).json()
    assert alone["usage"]["prompt_tokens"] > 400
    both = server.ask(documents=sent, search={"query": "billing", "k": 30}).json()
    assert len(both["blend"]["chunks"]) > len(alone["blend"]["chunks"])
    [note] = [note for note in both["blend"]["notes"] if "left out" in note]
    assert "/" not in note


def test_stored_chunks_are_named_and_searched(server: Any) -> None:
    for page in PAGES:
        put = server.client.put(f"/v1/documents/{page['id']}", json={"text": page["text"], "title": page.get("title")})
        assert put.status_code == 201
        assert {c["status"] for c in put.json()["chunks"]} == {"new"}
    again = server.client.put("/v1/documents/b", json={"text": PAGES[1]["text"]})
    assert (again.status_code, {c["status"] for c in again.json()["chunks"]}) == (200, {"unchanged"})
    [hit] = server.client.post("/v1/search", json={"query": "parrot"}).json()["data"]
    assert (hit["document"], "parrot" in hit["text"]) == ("b", True)
    [chunk] = server.ask(chunks=[hit["id"][:12]]).json()["blend"]["chunks"]
    assert (chunk["document"], chunk["status"]) == ("b", "exact")
    found = server.ask(search={"query": "billing", "k": 1}, messages=[{"role": "user", "content": "who?"}]).json()
    assert [c["document"] for c in found["blend"]["chunks"]] == ["a"]
    explained = server.ask(chunks=[hit["id"]], blend={"selector": "hkvd", "check_layer": 2}, explain=True)
    assert explained.status_code == 200
    assert problems(explained.json()["blend"], "Blend") == []
    assert problems(found["blend"], "Blend") == []
    nothing = server.ask(search={"query": "zebra"})
    assert (nothing.status_code, "/" in nothing.json()["error"]["message"]) == (404, False)
    assert [d["id"] for d in server.client.get("/v1/documents").json()["data"]] == ["a", "b"]
    assert server.client.delete("/v1/documents/b").json()["deleted"] is True
    assert server.client.delete("/v1/documents/b").status_code == 404
    assert server.client.post("/v1/search", json={"query": "parrot"}).json()["data"] == []
    assert [d["id"] for d in server.client.get("/v1/documents").json()["data"]] == ["a"]


def test_files_are_not_told_by_their_paths(server: Any, engine: Engine, tmp_path: Any) -> None:
    from cacheblend_cli.collect.precompute import PrecomputeOptions

    (tmp_path / "secret-place").mkdir()
    (tmp_path / "secret-place" / "page.md").write_text(PAGES[0]["text"])
    store: ChunkStore = server.state.store
    engine.precompute(store, [str(tmp_path / "secret-place")], PrecomputeOptions(), lambda event: None)
    replies = [
        server.ask(search={"k": 1}, messages=[{"role": "user", "content": "billing"}], explain=True),
        server.client.post("/v1/search", json={"query": "billing"}),
        server.client.get("/v1/documents"),
    ]
    for reply in replies:
        assert reply.status_code == 200
        assert "page.md" in reply.text
        assert "secret-place" not in reply.text


def test_any_model_answers_requests_that_name_another(start: Callable[..., Any]) -> None:
    strict, lenient = start(), start(any_model=True)
    requests = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "stream": False, "options": {"num_predict": 1}}),
        ("/api/generate", {"prompt": "a", "stream": False, "options": {"num_predict": 1}}),
    ]
    for path, body in requests:
        body["model"] = "gpt-4o-mini"
        assert strict.client.post(path, json=body).status_code == 404
        reply = lenient.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == "gpt-4o-mini"


def test_a_weak_match_can_be_refused(start: Callable[..., Any]) -> None:
    server = start()
    server.client.put("/v1/documents/a", json={"text": "The fjord is north of Bergen."})
    body = {
        "search": {"query": "Ulaanbaatar, capital of Mongolia?"},
        "messages": [{"role": "user", "content": "Ulaanbaatar of Mongolia?"}],
    }
    assert server.ask(**body).status_code == 404, "no word of it"
    body["search"]["query"] += " Bergen"
    assert server.ask(**body).json()["blend"]["weak_match"] is True
    server.state.settings = replace(server.state.settings, on_weak_match="refuse")
    refused = server.ask(**body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "nothing_found")
    assert refused.json()["error"]["message"] == WEAK
