"""Answers that another server decodes: prefilled here, handed over as a file or by HTTP ranges, told in our own
form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import httpx
import pytest
import torch
from cacheblend_vllm.files import HandOverDirectory
from fake_vllm import FakeServer
from transformers import AutoModelForCausalLM

from cacheblend_cli.errors import UsageError

pytest.importorskip("httpx2")
DOCUMENTS = [
    {"text": "the lead of billing is Mara and she works in Bergen near the harbor"},
    {"text": "Jonas keeps a parrot at home and the parrot works in Bergen"},
]
KEYS = ("plain-key-0000", "ada:ada-key-000000")


@pytest.fixture
def directory(tmp_path: Path) -> HandOverDirectory:
    return HandOverDirectory(tmp_path / "shm")


@pytest.fixture
def fake(model: Path, directory: HandOverDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    fake_vllm.install(monkeypatch)
    from cacheblend_vllm.handover import HandOverSource

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with fake_vllm.serving(FakeServer(loaded, HandOverSource(str(directory.path), None))) as running:
        yield running


@pytest.fixture
def start_both(start: Any, fake: FakeServer, directory: HandOverDirectory) -> Any:
    from cacheblend_vllm.decoder import VLLMDecoder

    return lambda **more: start(decoder=VLLMDecoder(f"{fake.url},{directory.path}"), **more)


def said(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def test_a_remote_decoder_gives_this_engines_answer(
    start: Any, start_both: Any, fake: FakeServer, directory: HandOverDirectory
) -> None:
    here, there = start(), start_both()
    for ratio in (1.0, 0.2):
        asked = {"documents": DOCUMENTS, "blend": {"ratio": ratio}, "max_tokens": 8}
        for _ in range(2):  # with all chunks missing, then stored
            own, other = here.ask(**asked), there.ask(**asked)
            assert said(own) == said(other)
            told = json.loads(own.text.replace(str(here.client.base_url), str(there.client.base_url)))
            for name in ("usage", "choices"):
                assert told[name] == other.json()[name]
            blend = other.json()["blend"]
            assert [c["status"] for c in blend["chunks"]] == [c["status"] for c in own.json()["blend"]["chunks"]]
            assert fake.loaded[-1] == blend["prompt_tokens"] - 1
    assert len(fake.requests) == 4
    assert list(directory.path.iterdir()) == [], "a hand-over ends with its request"
    assert not blend["notes"]


def test_streams_stops_and_usage(start: Any, start_both: Any, fake: FakeServer) -> None:
    here, there = start(), start_both()
    whole = said(here.ask(documents=DOCUMENTS, max_tokens=8))
    stop = whole[len(whole) // 2 :][:2]
    for more in ({}, {"stop": [stop]}, {"stop": [whole[:2]]}):  # the last one leaves no text
        asked = {
            "documents": DOCUMENTS,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        texts, usages = [], []
        for server in (here, there):
            lines = [line[6:] for line in server.ask(**asked).text.splitlines() if line.startswith("data: {")]
            records = [json.loads(line) for line in lines]
            texts.append("".join(c["delta"].get("content", "") for r in records for c in r["choices"]))
            usages.append(records[-1]["usage"]["completion_tokens"])
        assert texts[0] == texts[1]
        assert usages[0] == usages[1]
    assert len(fake.requests) == 3


def test_over_http_ranges(start_both: Any, fake: FakeServer) -> None:
    from cacheblend_vllm.handover import HandOverSource

    server = start_both()
    fake.place = HandOverSource(None, server.url.removesuffix("/v1"))
    reply = server.ask(documents=DOCUMENTS)
    assert fake.loaded == [reply.json()["blend"]["prompt_tokens"] - 1]
    name = fake.requests[0]["kv_transfer_params"]["cacheblend"]["id"]
    for wrong in (name, "0" * 32, "..%2f" + name):
        assert server.client.get(f"/handovers/{wrong}").status_code == 404


def test_without_the_other_server_it_is_decoded_here(start: Any, start_both: Any, fake: FakeServer) -> None:
    own = said(start().ask(documents=DOCUMENTS))
    server = start_both()
    fake.place = None  # it answers 500
    reply = server.ask(documents=DOCUMENTS)
    assert said(reply) == own
    assert any("--decoder" in note for note in reply.json()["blend"]["notes"])


def test_a_decoder_that_dies_within_an_answer_is_told(
    start_both: Any, fake: FakeServer, directory: HandOverDirectory
) -> None:
    server = start_both()
    fake.cut_after = 2
    reply = server.ask(documents=DOCUMENTS, max_tokens=8)
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "decoder_failed"
    assert list(directory.path.iterdir()) == []


def test_a_deadline_and_a_client_that_leaves_end_the_hand_over(
    start_both: Any, fake: FakeServer, directory: HandOverDirectory
) -> None:
    server = start_both()
    said(server.ask(documents=DOCUMENTS))
    fake.goes_on.clear()
    reply = server.ask(documents=DOCUMENTS, timeout_s=0.2)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
    assert list(directory.path.iterdir()) == []
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}]}, timeout=0.3)
    fake.goes_on.set()
    said(server.ask(documents=DOCUMENTS))
    assert list(directory.path.iterdir()) == []


def test_blocks_are_kept_apart_by_tenant_policy_and_question(start_both: Any, fake: FakeServer) -> None:
    server = start_both(keys=KEYS)
    key, other = "plain-key-0000", "ada-key-000000"

    def salt(key: str, question: str, ratio: float = 0.2) -> str:
        for _ in range(2):  # stored after the first
            server.ask(
                key, documents=DOCUMENTS, blend={"ratio": ratio}, messages=[{"role": "user", "content": question}]
            )
        return fake.requests[-1]["cache_salt"]

    first = salt(key, "who?")
    assert salt(key, "who?") == first
    assert len({first, salt(other, "who?"), salt(key, "where?"), salt(key, "who?", 0.4)}) == 4


def test_requests_vllm_cannot_decode_are_decoded_here(start_both: Any, fake: FakeServer) -> None:
    server = start_both()
    for more in ({"logprobs": True}, {"n": 2}, {"verify": True}, {"regex": "(yes|no)"}):
        assert server.ask(documents=DOCUMENTS, **more).status_code == 200
    assert fake.requests == []


def test_files_of_dead_producers_are_removed(tmp_path: Path) -> None:
    directory = HandOverDirectory(tmp_path / "d")
    living = directory.new()
    dead = tmp_path / "d" / f"{'0' * 32}.safetensors"
    dead.write_bytes(b"x")
    path = tmp_path / "d" / f"{living.name}.safetensors"
    import fcntl
    import os

    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    HandOverDirectory(tmp_path / "d")
    assert [file.name for file in (tmp_path / "d").iterdir()] == [path.name]
    os.close(held)
    (tmp_path / "d").chmod(0o755)
    with pytest.raises(UsageError):
        HandOverDirectory(tmp_path / "d")
