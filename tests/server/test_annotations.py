"""Sources of an answer as OpenAI's annotations: in the message, in the last delta, and as links that open a passage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from browser import Browser, Page

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.server.openai.annotations import annotations_of
from cacheblend_cli.server.preprocessing import Origin
from cacheblend_cli.types import PLAIN, Answer, AskRequest, ChunkUse, Claim, SamplingParams

PAGE = "http://127.0.0.1:8321/"
PAGES = [
    {"id": "a", "title": "Billing", "text": "the lead of billing is Mara and she works in Bergen"},
    {"id": "https://wiki.example/pets", "text": "Jonas keeps a parrot at home near the harbor"},
]
KEYS = ("plain-key-0000", "ada:ada-key-000000", "bob:bob-key-000000")


@pytest.fixture(scope="module")
def answer(engine: Engine) -> Answer:
    return engine.run_alone(None, AskRequest("who?", sampling=SamplingParams(max_tokens=1), prompt=PLAIN))


def chunk(number: int, place: str = "", rank: int | None = None) -> ChunkUse:
    return ChunkUse(f"{number}" * 40, f"/srv/secret/{number}.md", 9, "exact", 0, place=place, rank=rank)


def cited(found: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    assert {annotation["type"] for annotation in found} <= {"url_citation"}
    citations = [annotation["url_citation"] for annotation in found]
    return [(one["title"], one["start_index"], one["end_index"]) for one in citations]


def test_claims_are_cited_at_their_place_and_other_chunks_at_the_end(answer: Answer) -> None:
    text = "Mara asks for 54 euros on 3 May."
    claims = [
        Claim("Mara", 0, 4, "name", True, 1, "page 2"),
        Claim("54 euros", 14, 22, "number", False),
        Claim("3 May", 26, 31, "date", True, 1, "page 2"),
        Claim("May", 28, 31, "name", True),  # in the question
    ]
    chunks = [chunk(1, rank=2), chunk(2, "page 2", 3), chunk(3, rank=1), chunk(4)]
    made = replace(answer, text=text, claims=claims, chunks=chunks)
    origins = [Origin(f"file-{i}", f"{i}.md") for i in range(1, 5)]
    found = cited(annotations_of(made, origins, PAGE))
    end = len(text)
    assert found[:2] == [("2.md, page 2", 0, 4), ("2.md, page 2", 26, 31)]
    assert found[2:] == [("3.md", end, end), ("1.md", end, end), ("4.md", end, end)]


def test_a_link_opens_the_passage_and_tells_no_path(answer: Answer) -> None:
    names = [
        ("file-1", "a b#c.md"),
        ("https://wiki.example/x", ""),
        ("7", "http://wiki.example/y"),
        ("https://x y", ""),
    ]
    made = replace(answer, chunks=[chunk(i, "lines 1-9") for i in range(1, 5)])
    links = [a["url_citation"]["url"] for a in annotations_of(made, [Origin(*name) for name in names], PAGE)]
    assert all(link.startswith(f"{PAGE}#") for link in links), "a name that is an address is not a link"
    assert links[0] == f"{PAGE}#a%20b%23c.md%2C%20lines%201-9/{'1' * 12}"
    assert unquote(links[3]) == f"{PAGE}#https://x y, lines 1-9/{'4' * 12}"
    assert "secret" not in str(links)


def test_passages_of_the_messages_are_not_cited(answer: Answer) -> None:
    made = replace(answer, text="Mara", chunks=[chunk(1), chunk(2)], claims=[Claim("Mara", 0, 4, "name", True, 0)])
    found = annotations_of(made, [Origin("1", "a.md", in_message=True), Origin("2", "b.md")], PAGE)
    assert [title for title, _, _ in cited(found)] == ["b.md"]


def test_a_server_that_finds_passages_cites_the_other_documents(start: Any) -> None:
    server = start(find_passages=True)
    server.ask(documents=PAGES)  # from here on they are stored
    passage = '<source id="1" name="a.md">Mara leads billing.</source>\n\nWho leads billing?'
    for given, expected in (({}, []), ({"documents": PAGES[:1]}, ["Billing"])):
        reply = server.ask(messages=[{"role": "user", "content": passage}], **given).json()
        [message] = [choice["message"] for choice in reply["choices"]]
        assert [title for title, _, _ in cited(message.get("annotations", []))] == expected


def test_clients_read_them_whole_and_in_the_last_delta(server: Any) -> None:
    openai = pytest.importorskip("openai")
    asked: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "who?"}], "max_tokens": 4, "n": 2, "extra_body": {"documents": PAGES},
    }  # fmt: skip
    server.ask(documents=PAGES)  # from here on they are stored, which keeps no lines of theirs
    with openai.OpenAI(base_url=server.url, api_key="none") as client:
        reply = client.chat.completions.create(**asked)
        *_, last, usage = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        plain = client.chat.completions.create(**asked | {"extra_body": {}})
    texts = [choice.message.content for choice in reply.choices]
    for choice, text in zip(reply.choices, texts, strict=True):
        own, wiki = (annotation.url_citation for annotation in choice.message.annotations)
        assert (own.title, own.start_index, own.end_index) == ("Billing", len(text), len(text))
        assert own.url.startswith(server.url.removesuffix("v1") + "#Billing/")
        assert wiki.title == PAGES[1]["id"]
        assert wiki.url.startswith(server.url.removesuffix("v1") + "#https%3A%2F%2F"), "a name is not a link"
    [choice] = last.choices
    assert (choice.finish_reason, usage.choices) == (reply.choices[-1].finish_reason, [])
    assert choice.delta.annotations == [a.model_dump() for a in reply.choices[choice.index].message.annotations]
    assert plain.choices[0].message.annotations is None
    completion = server.client.post("/v1/completions", json={"prompt": "who", "max_tokens": 2, "documents": PAGES})
    assert "annotations" not in completion.text


def test_claims_of_the_engine_reach_the_message(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_cli.server.openai import response

    def claimed(answer: Answer, *rest: Any) -> Any:
        return annotations_of(replace(answer, claims=[Claim("x", 0, 1, "name", True, 0)]), *rest)

    server.ask(documents=PAGES)  # from here on they are stored
    monkeypatch.setattr(response, "annotations_of", claimed)
    whole = server.ask(documents=PAGES).json()["choices"][0]["message"]["annotations"]
    lines = server.ask(documents=PAGES, stream=True).text.split("\n\n")
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-2]]
    assert deltas[-1]["annotations"] == whole
    assert cited(whole)[0] == ("Billing", 0, 1)
    assert not any("annotations" in delta for delta in deltas[:-1])


def test_langchain_gets_the_same_text(server: Any) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    made = chat(model="tiny", base_url=server.url, api_key="none", max_tokens=4, extra_body={"documents": PAGES})
    reply = made.invoke("who?")
    assert "".join(str(part.content) for part in made.stream("who?")) == reply.content
    assert reply.content_blocks[0]["text"] == reply.content


def read(server: Any, name: str, key: str = "") -> httpx.Response:
    return server.client.get(f"/v1/chunks/{name}", headers={"Authorization": f"Bearer {key}"} if key else {})


def test_a_linked_passage_is_read(server: Any) -> None:
    message = server.ask(documents=PAGES).json()["choices"][0]["message"]
    number = message["annotations"][0]["url_citation"]["url"].rpartition("/")[2]
    passage = read(server, number).json()
    assert passage["id"].startswith(number)
    assert PAGES[0]["text"] in passage["text"]
    assert passage["title"] == ""  # the store keeps no name of a document that came with a question
    for wrong in ("0" * 12, "x", "%20"):
        assert read(server, wrong).json()["error"]["code"] == "chunk_not_found"


def test_a_link_tells_no_path_of_the_socket(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 1, "documents": PAGES[:1]}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket))) as client:
        for host in ("wiki.example", "a b"):
            reply = client.post("http://x/v1/chat/completions", json=body, headers={"Host": host})
            assert str(server.socket) not in reply.text
            [annotation] = reply.json()["choices"][0]["message"]["annotations"]
            place = "http://localhost/#" if " " in host else f"http://{host}/#"
            assert annotation["url_citation"]["url"].startswith(place)


def test_a_tenant_reads_its_own_passages(start: Any) -> None:
    server = start(KEYS)
    plain, ada, bob = (key.rpartition(":")[2] for key in KEYS)
    name = server.ask(ada, documents=PAGES).json()["blend"]["chunks"][0]["id"]
    assert read(server, name).status_code == 401
    assert read(server, name, ada).status_code == 200
    assert read(server, name[:12], ada).json()["id"] == name
    assert read(server, name, plain).status_code == read(server, name, bob).status_code == 404
    assert read(server, name[:4], ada).json()["error"]["param"] == "id"


def test_the_page_opens_a_linked_passage(server: Any, tmp_path: Path) -> None:
    server.client.put("/v1/documents/pets", json={"text": "Jonas keeps a parrot at home. " * 12, "title": "Pets"})
    asked = server.ask(search={"query": "parrot", "k": 1}).json()["choices"][0]["message"]
    [link] = [annotation["url_citation"]["url"] for annotation in asked["annotations"]]
    with Browser(tmp_path) as browser, Page(f"{link}#:~:text=Pets", browser) as page:  # as Open WebUI links it
        page.until("document.querySelectorAll('#passage-text > div').length > 1")
        assert page.js("document.getElementById('passage-title').textContent") == "1. Pets"
        assert "parrot" in page.js("document.querySelector('#passage-text .current').textContent")
        assert page.js("document.querySelector('#passage .legend').hidden")
        sent = server.ask(documents=PAGES[:1]).json()["choices"][0]["message"]["annotations"][0]["url_citation"]
        page.js(f"document.getElementById('passage').close(); location.hash = {sent['url'].partition('#')[2]!r}")
        page.until("document.getElementById('passage-text').textContent.includes('Mara')")
        assert page.js("document.getElementById('passage-title').textContent") == f"1. {sent['title']}"
        page.js("document.getElementById('passage').close(); location.hash = '#<b>gone</b>/000000000000'")
        page.until("document.getElementById('passage').open")
        assert "no chunk" in page.js("document.getElementById('passage-title').textContent")
        assert page.js("document.querySelector('#passage b') === null")


def test_a_server_shows_no_path_of_a_file(server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    for name in ("team.md", "team copy.md"):
        (folder / name).write_text("Mara leads billing in Bergen and keeps a parrot.\n")
    server.state.engine.precompute(server.state.store, [str(folder)], PrecomputeOptions(), lambda event: None)
    reply = server.ask(search={"query": "parrot"})
    [annotation] = reply.json()["choices"][0]["message"]["annotations"]
    assert annotation["url_citation"]["title"] == "team.md, line 1"
    passage = read(server, annotation["url_citation"]["url"].rpartition("/")[2])
    assert passage.json()["title"] == "team.md"
    [hit] = server.client.post("/v1/search", json={"query": "parrot"}).json()["data"]
    [used] = reply.json()["blend"]["chunks"]
    ids = {document["id"] for document in server.client.get("/v1/documents").json()["data"]}
    assert {hit["document"], *hit["also_in"]} == {used["document"], *used["also_in"]} == ids
    assert "private" not in reply.text + passage.text
