"""One question asked in six ways has one answer: the same tokens and, to the bit, the same log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from command_line import Cli

from cacheblend_cli import Engine

QUESTION = "who leads billing?"


@pytest.mark.parametrize("mode", ["blend", "full"])
def test_one_question_in_six_ways(cli: Cli, start: Any, model: Path, tmp_path: Path, mode: str) -> None:
    """By `ask`, a warm `ask`, `ask --batch`, `chat`, HTTP and Python."""
    ids = cli("chunks", "ls", "-q").out.split()
    flags = ("--chunks", ",".join(ids), "--mode", mode)
    told = (*flags, "--json", "--ids", "--logprobs", "2")
    cold = json.loads(cli("ask", QUESTION, *told, "--local").out)
    assert [chunk["status"] for chunk in cold["chunks"]] == {"blend": ["exact", "blended"], "full": ["computed"] * 2}[
        mode
    ]
    text, expected = cold["answer"], (cold["generated_ids"], cold["logprobs"])
    rows = "".join(json.dumps({"question": QUESTION, "chunks": ids}) + "\n" for _ in range(3))
    batch = cli("ask", "--batch", "-", *told[2:], "--local", stdin=rows).out.splitlines()
    chat = cli("chat", *flags, "--local", stdin=QUESTION + "\n").out
    with (
        ChunkStore.open(tmp_path / "store0") as store,
        Engine.load(str(model), threads=1, max_tokens=6, mode=mode) as engine,
    ):
        engine.use(store)
        python = [engine.ask(QUESTION, chunks=ids), *engine.ask_many([QUESTION] * 2, chunks=ids)]
    server = start()
    warm = [json.loads(cli("ask", QUESTION, *told).out) for _ in range(2)]
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "chunks": ids,
        "max_tokens": 6,
        "blend": {"mode": mode},
    }
    reply = server.client.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 2}).json()
    [choice] = reply["choices"]

    for record in (*map(json.loads, batch), *warm):
        assert (record["generated_ids"], record["logprobs"]) == expected
    assert server.state.engine.service.stats().finished == 3  # the warm ones were asked of it
    assert chat == text + "\n"
    assert [answer.generated_ids for answer in python] == [expected[0]] * 3
    assert choice["message"]["content"] == text
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [token["logprob"] for token in expected[1]]
