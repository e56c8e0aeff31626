"""The clients that people have: openai's, langchain's and curl, over TCP and over a socket."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

PAGES = [{"id": "a", "text": "the lead of billing is Mara"}, {"id": "b", "text": "Jonas keeps a parrot at home"}]
ASKED = [{"role": "user", "content": "who leads billing?"}]


@pytest.fixture(params=["tcp", "socket"])
def client(server: Any, request: pytest.FixtureRequest) -> Any:
    openai = pytest.importorskip("openai")
    transport = httpx.HTTPTransport(uds=str(server.socket)) if request.param == "socket" else None
    with openai.OpenAI(base_url=server.url, api_key="none", http_client=httpx.Client(transport=transport)) as made:
        yield made


def test_openai(client: Any) -> None:
    import openai

    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    extra = {"documents": PAGES, "blend": {"ratio": 0.5}}
    reply = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=4, extra_body=extra)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=4, extra_body=extra)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert [c["status"] for c in again.blend["chunks"]] == ["exact", "blended"]  # whoever asked before
    stream = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=4, extra_body=extra, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in stream)
    assert text == again.choices[0].message.content
    done = client.completions.create(model="tiny", prompt="the lead of", max_tokens=2)
    assert done.usage.completion_tokens <= 2
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Mara " * 2000}], stream=True
        )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=ASKED)


def test_langchain(server: Any) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    made = chat(
        model="tiny", base_url=server.url, api_key="none", max_tokens=4, temperature=0, extra_body={"documents": PAGES}
    )
    reply = made.invoke([("system", "Be kind."), ("human", "who leads billing?")])
    streamed = "".join(
        str(part.content) for part in made.stream([("system", "Be kind."), ("human", "who leads billing?")])
    )
    assert streamed == reply.content
    assert reply.usage_metadata["input_tokens"] > 0
    assert made.invoke("who?").usage_metadata["input_token_details"]["cache_read"] >= 0


def test_the_example_with_langchain_runs(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_openai")
    server.client.put("/v1/documents/offices", json={"text": "The office in Bergen is near the harbor. Mara leads it."})
    text = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "langchain" in block]
    assert code.count("http://127.0.0.1:8321/v1") == 1
    (tmp_path / "example.py").write_text(code.replace("http://127.0.0.1:8321/v1", server.url))
    runpy.run_path(str(tmp_path / "example.py"))
    assert "'cache_read': " in capsys.readouterr().out


@pytest.mark.parametrize("over", ["tcp", "socket"])
def test_curl(server: Any, over: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    address = ["--unix-socket", str(server.socket), "http://localhost/v1"] if over == "socket" else [server.url]
    body = json.dumps({"messages": ASKED, "max_tokens": 3, "documents": PAGES})
    command = ["curl", "-sS", *address[:-1], f"{address[-1]}/chat/completions", "--json", body]
    reply = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert reply["usage"]["completion_tokens"] <= 3
    assert len(reply["blend"]["chunks"]) == 2
