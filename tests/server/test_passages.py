"""Passages in messages: which are found, what is left, that they are the chunks of `documents`, and that they are a
tenant's own."""

from __future__ import annotations

import re
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.server.passages import elements_of

BILLING, PARROT = "the lead of billing is Mara", "Jonas keeps a parrot at home"
WEBUI = f"""### Task:
Respond using the context, with citations [id].

<context>
<source id="1" name="team.md">{BILLING}</source>
<source id="2" name="pets.md">{PARROT}</source>
</context>

who leads billing?"""
ANTHROPIC = f"""<documents>
<document index="1">
<source>team.md</source>
<document_content>
{BILLING}
</document_content>
</document>
</documents>
who leads billing?"""


def texts_of(text: str) -> list[tuple[str, str, str]]:
    return [(e.id, e.title, text[slice(*e.inner)].strip()) for e in elements_of(text)]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_known_forms() -> None:
    assert texts_of(WEBUI) == [("1", "team.md", BILLING), ("2", "pets.md", PARROT)]
    assert texts_of(ANTHROPIC) == [("1", "team.md", BILLING)]
    assert texts_of(f"<document title='A' id=\"x\">\n{BILLING}\n</document>") == [("x", "A", BILLING)]
    assert texts_of(f"<source>{BILLING}</source>") == [("", "", BILLING)]
    assert texts_of(f"<document><title>A</title>{BILLING}</document>") == [("", "", f"<title>A</title>{BILLING}")]


TEMPLATE = f"""### Task:
Answer from the context. Cite as [id] **only if the <source> tag has an id** (for example, <source id="1">).

- Cite only a <source> tag with an id, and no XML such as </i>.
- If a <document> has no answer, say so.

<context>
<source id="1" name="team.md" resource-type="file" resource-id="49175fd1-e258-4a05-b269-f053e88ebd45">{BILLING}</source>
<source id="2" name="pets.md" resource-type="file" resource-id="575bf537-c85a-49c9-b51d-7cede936116e">{PARROT}</source>
</context>

who leads billing, and what does <source> mean?"""
"""Instructions like those of Open WebUI's default template, which mention the tag; sources as 0.12.4 writes them."""


def test_mentions_of_tags_are_not_passages() -> None:
    assert texts_of(TEMPLATE) == texts_of(WEBUI)
    assert texts_of(f"Use <source> tags. {ANTHROPIC}") == texts_of(ANTHROPIC)
    inside = f'<source id="1" name="a.md">{BILLING}: the <source> tag, the <document> tag</source>'
    assert texts_of(inside) == [("1", "a.md", f"{BILLING}: the <source> tag, the <document> tag")]
    assert texts_of(f"<source>{BILLING}</source> and <source> alone") == [("", "", BILLING)]


def test_elements_of_html_inside_a_passage_are_its_text() -> None:
    page = f'<video><source src="x.mp4" type="video/mp4"><source srcset="y"></video> {BILLING}'
    assert texts_of(f'<source id="1" name="a.html">{page}</source>') == [("1", "a.html", page)]


@pytest.mark.parametrize(
    "name", ['He said "hi".md', "a>b.md", "Bob's.md", "a > b", 'a="b".md', "x>'y'.md", "", 'one" disk.md', "id=7.md"]
)
def test_names_can_have_quotes_and_brackets(name: str) -> None:
    elements = texts_of(
        f'<source id="1" name="{name}">{BILLING}</source>\n<source id="1" name="b.md">{PARROT}</source>'
    )
    assert elements == [("1", name, BILLING), ("1", "b.md", PARROT)]


@pytest.mark.parametrize(
    "text",
    [
        "<source id='1'>a",
        "a</source>",
        "<source>a<source>b</source></source>",
        "<source>a</source></source>",
        "<document>a</source>",
        "<source>a</document>",
        "<document>a <source> b</document> c </source>",
        "<source> \n </source>",
        "<source/>a</source>",
        "< source>a</ source>",
        "<sources>a</sources>",
        "<source-map>a</source-map>",
        "<SOURCE>a</SOURCE>",
        "an <a href='x'>ordinary</a> question about 1 < 2",
    ],
)
def test_other_text_stays_text(text: str) -> None:
    assert elements_of(text) == []


@given(
    st.lists(
        st.sampled_from(["<source>", "</source>", "<document a='b'>", "</document>", "<source/>", "a", "<", ">", " "])
    )
)
def test_elements_do_not_overlap(pieces: list[str]) -> None:
    text = "".join(pieces)
    end = 0
    for element in elements_of(text):
        assert end <= element.start < element.inner[0] < element.inner[1] < element.end
        assert text[slice(*element.inner)].strip()
        end = element.end


@pytest.mark.parametrize(
    "piece",
    [
        "<source ",
        "<source>",
        "<source a",
        "<document><document_content>",
        "<source " + "a" * 4000 + ">",
        "</document_content>",
        '<source id="',
        '<source "a" "b"',
        '<source id="1">',
        "<source a=''",
    ],
)
def test_hostile_texts_cost_linear_time(piece: str) -> None:
    def seconds(count: int) -> float:
        text = f"<document>{piece * (count // len(piece))}</document>"
        start = time.process_time()
        elements_of(text)
        return time.process_time() - start

    seconds(1000)
    assert seconds(2_000_000) < 100 * max(seconds(100_000), 0.001)  # 400 where it is quadratic


def test_passages_become_the_chunks_of_documents(start: Any) -> None:
    server = start(find_passages=True)
    pages = [{"id": "x", "title": "team.md", "text": BILLING}, {"id": "y", "title": "pets.md", "text": PARROT}]
    reply = server.ask(messages=user(WEBUI)).json()["blend"]
    assert [(c["document"], c["title"], c["status"]) for c in reply["chunks"]] == [
        ("1", "team.md", "computed"),
        ("2", "pets.md", "computed"),
    ]
    assert reply["passages"] == [
        {"id": "1", "title": "team.md", "message": 0, "characters": len(BILLING)},
        {"id": "2", "title": "pets.md", "message": 0, "characters": len(PARROT)},
    ]
    other = WEBUI.replace("who leads billing?", "who has a bird?").replace(BILLING, f"\n {BILLING}\n")
    statuses = [c["status"] for c in server.ask(messages=user(other)).json()["blend"]["chunks"]]
    assert statuses == ["exact", "blended"]  # another question, and white space around a text
    both = server.ask(messages=user(WEBUI), documents=pages[:1]).json()["blend"]
    assert [c["document"] for c in both["chunks"]] == ["x", "2"]  # the same text is one chunk


def test_passages_of_a_template_that_mentions_the_tag(start: Any) -> None:
    server = start(find_passages=True)
    expected = server.ask(messages=user(WEBUI)).json()["blend"]["passages"]
    for messages in (user(TEMPLATE), [{"role": "system", "content": TEMPLATE}, *user("who?")]):
        blend = server.ask(messages=messages).json()["blend"]
        assert blend["passages"] == expected
        assert [c["title"] for c in blend["chunks"]] == ["team.md", "pets.md"]


def test_nothing_is_found_where_nobody_asked_for_it(server: Any) -> None:
    reply = server.ask(messages=user(WEBUI)).json()["blend"]
    assert (reply["chunks"], "passages" in reply) == ([], False)


def test_a_message_without_passages_is_as_before(start: Any, server: Any) -> None:
    finding = start(find_passages=True)
    for text in ("who leads billing?", "<source>unclosed, who?"):
        found, plain = (one.ask(messages=user(text), max_tokens=6).json() for one in (finding, server))
        assert found["choices"] == plain["choices"]
        assert (found["usage"], found["blend"]["passages"]) == (plain["usage"], [])


def test_what_the_model_sees(start: Any, engine: Any) -> None:
    """The passages, and behind them the message with empty elements; those of the system message stand before the
    question."""
    server = start(find_passages=True)
    decode = engine.model.tokenizer.decode

    def prompt(messages: list[dict[str, str]]) -> str:
        submitted = []
        submit = server.state.engine.service.submit
        server.state.engine.service.submit = lambda made, tell: submitted.append(made) or submit(made, tell)
        try:
            assert server.ask(messages=messages).status_code == 200
        finally:
            server.state.engine.service.submit = submit
        return decode(submitted[0].plan.token_ids, skip_special_tokens=False)

    text = prompt(user(WEBUI))
    left = WEBUI.replace(BILLING, "").replace(PARROT, "")
    order = [text.index(part) for part in (f"# team.md\n\n{BILLING}", f"# pets.md\n\n{PARROT}", left)]
    assert order == sorted(order)
    assert "not in the documents" not in text  # nothing of the server's own wording
    system = [{"role": "system", "content": f"Be kind.\n{WEBUI}"}, *user("who?")]
    text = prompt(system)
    assert "<context>\n\n</context>" in text
    assert '<source id="1" name="team.md"></source>\n<source id="2" name="pets.md"></source>\n\nwho?' in text
    assert "# team.md" in text


def test_a_system_prompt_is_the_same_whatever_was_retrieved(start: Any) -> None:
    server = start(find_passages=True)

    def ask(*sources: str) -> list[str]:
        context = "\n".join(f'<source id="{i}">{text}</source>' for i, text in enumerate(sources, 1))
        messages = [{"role": "system", "content": f"Use these.\n{context}\nBe kind."}, *user("who?")]
        return [c["status"] for c in server.ask(messages=messages).json()["blend"]["chunks"]]

    assert ask(BILLING, PARROT) == ["computed", "computed"]
    assert ask(PARROT) == ["exact"]
    assert ask(PARROT, BILLING, "a new text") == ["exact", "blended", "computed"]


def test_passages_of_earlier_turns_and_of_ollama(start: Any) -> None:
    server = start(find_passages=True)
    turns = [*user(WEBUI), {"role": "assistant", "content": "Mara <source>not mine</source>"}, *user("and the bird?")]
    reply = server.ask(messages=turns).json()["blend"]
    assert [p["message"] for p in reply["passages"]] == [0, 0]
    body = {"model": "tiny", "stream": False, "options": {"num_predict": 2}}
    chatted = server.client.post("/api/chat", json={**body, "messages": turns}).json()["blend"]
    assert [c["status"] for c in chatted["chunks"]] == ["exact", "blended"]
    generated = server.client.post("/api/generate", json={**body, "prompt": WEBUI}).json()["blend"]
    assert len(generated["passages"]) == 2
    raw = server.client.post("/api/generate", json={**body, "prompt": WEBUI, "raw": True}).json()["blend"]
    assert raw["chunks"] == []


def test_passages_are_a_tenants_own(start: Any) -> None:
    keys = ("ada:ada-key-000000", "bob:bob-key-000000")
    server = start(keys, find_passages=True)
    chunks = [server.ask(key[4:], messages=user(WEBUI)).json()["blend"]["chunks"] for key in keys]
    assert {c["id"] for c in chunks[0]}.isdisjoint(c["id"] for c in chunks[1])
    assert {c["status"] for own in chunks for c in own} == {"computed"}


def test_a_message_that_is_too_long_is_refused_before_it_is_read(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_cli.server import passages

    server = start(find_passages=True)
    monkeypatch.setattr(passages, "elements_of", lambda text: 1 / 0)
    reply = server.ask(messages=user("<source>a</source>" * 100_000))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_passages_go_before_a_search(start: Any) -> None:
    server = start(find_passages=True, retrieve=True)
    server.client.put("/v1/documents/page", json={"text": "Mara works in Bergen and leads billing."})
    assert [c["document"] for c in server.ask(messages=user(WEBUI)).json()["blend"]["chunks"]] == ["1", "2"]
    assert [c["document"] for c in server.ask(messages=user("who works in Bergen?")).json()["blend"]["chunks"]] == [
        "page"
    ]


def test_the_example_with_langchain_runs(start: Any, tmp_path: Path) -> None:
    pytest.importorskip("langchain_ollama")
    server = start(find_passages=True)
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "langchain" in block]
    assert code.count("http://127.0.0.1:8321") == 1
    (tmp_path / "example.py").write_text(code.replace("http://127.0.0.1:8321", str(server.client.base_url)))
    runpy.run_path(str(tmp_path / "example.py"))
    assert 'cacheblend_chunks_total{status="computed"} 2.0' in server.client.get("/metrics").text
