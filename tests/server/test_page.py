"""The page, in a browser: documents dropped, questions asked and stopped, conversations kept, sources opened."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from omitting import leave_out

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.core.core import EngineCore
from cacheblend_cli.types import Piece

PAGES = {
    "billing": "the lead of billing is Mara and she works in Bergen, near the harbor, with a parrot at home",
    "parrots": "Jonas keeps a parrot at home <b>in Bergen</b> near the harbor",
}
QUESTION = "who keeps a parrot in Bergen?"
ANSWERED = "document.getElementById('stop').hidden && document.querySelectorAll('.footnote').length"
COMPARED = "document.querySelector('.comparison .small') !== null"
LONG = " ".join(f"On day {i} Mara counted the parrots of Bergen near the harbor." for i in range(12))


def stored(server: Any) -> None:
    for name, text in PAGES.items():
        assert server.client.put(f"/v1/documents/{name}", json={"text": text}).status_code == 201


def text_of(page: Page, selector: str) -> str:
    text: str = page.js(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent).join('|')")
    return text


def click(page: Page, selector: str) -> None:
    page.js(f"document.querySelector({selector!r}).click()")


def drop(page: Page, **files: str) -> None:
    page.js(
        f"""(() => {{
            const data = new DataTransfer();
            for (const [name, text] of Object.entries({json.dumps(files)}))
                data.items.add(new File([text], name.replace("_", ".")));
            document.body.dispatchEvent(new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }}));
        }})()"""
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(server: Any, browser: Browser) -> Iterator[Page]:
    """The page of a server with two documents, ready for a question."""
    stored(server)
    with Page(server.url.removesuffix("v1"), browser) as page:
        page.until("document.querySelectorAll('#documents li').length === 2")
        yield page


def ask(page: Page, question: str = QUESTION) -> None:
    page.type(question)
    page.press("Enter")
    page.until(ANSWERED)


def test_a_question_is_asked_with_the_keyboard(server: Any, page: Page) -> None:
    assert page.js("document.activeElement.id") == "question"
    assert page.js("document.getElementById('key').offsetParent === null")  # no key is needed here
    page.type("who keeps")
    page.press("Enter", shift=True)
    page.js("document.getElementById('question').value = ''")
    assert page.js("document.querySelectorAll('.turn').length") == 0
    ask(page)
    messages = [{"role": "user", "content": QUESTION}]
    expected = server.ask("", messages=messages, search={"k": 5}, max_tokens=8).json()
    assert text_of(page, ".answer > .said") == expected["choices"][0]["message"]["content"]
    chunks = sorted(expected["blend"]["chunks"], key=lambda chunk: chunk["rank"])
    assert text_of(page, ".footnote .badge").split("|") == [c["status"] for c in chunks]
    for _ in range(40):  # Tab reaches the button
        page.press("Tab")
        if page.js("document.activeElement.className") == "compare":
            break
    page.press(" ")
    page.until(COMPARED)
    assert page.js("document.activeElement.className") == "comparison"
    assert page.js("document.querySelector('.compare') === null")


def answering(page: Page, blended: str, full: str) -> None:
    """Have the server answer with these texts. window.sent: bodies of requests as the page made them."""
    page.js(
        f"""(() => {{
            const send = window.fetch, texts = {json.dumps([re.escape(text) for text in (blended, full)])};
            window.sent = [];
            window.fetch = (url, options) => {{
                if (!`${{url}}`.endsWith("/chat/completions")) return send(url, options);
                const body = JSON.parse(options.body);
                sent.push(body);
                return send(url, {{ ...options, body: JSON.stringify({{
                    ...body, regex: texts[Number(body.blend?.mode === "full")], max_tokens: 200 }}) }});
            }};
        }})()"""
    )


def test_a_wrong_answer_is_shown_beside_a_full_prefills(page: Page) -> None:
    answering(page, "The price is 45 euros a month.", "The price is 54 euros a year.")
    ask(page)
    click(page, ".compare")
    page.until(COMPARED)
    assert text_of(page, ".comparison [role=status]") == "The full prefill's answer differs from word 4 on."
    assert text_of(page, ".comparison .said") == "The price is 45 euros a month.|The price is 54 euros a year."
    assert text_of(page, ".comparison mark") == "45 euros a month.|54 euros a year."
    assert re.fullmatch(
        r"First token: blended [\d.]+ s, full prefill [\d.]+ s", text_of(page, ".comparison .small:not(.note)")
    )
    line = page.js("getComputedStyle(document.querySelector('.comparison mark')).textDecorationLine")
    assert line == "underline"  # not by colour alone
    first, second = page.js("sent")
    assert second == {**first, "blend": {"mode": "full"}}
    assert isinstance(first["seed"], int)
    page.reload()
    page.until("document.querySelectorAll('#conversations li').length === 1")
    click(page, "#conversations .name")
    assert text_of(page, ".comparison mark") == "45 euros a month.|54 euros a year."


def test_claims_open_their_passage_or_are_underlined(page: Page) -> None:
    text = "🦜 Mara keeps 4 parrots in Bergen, says Jonas Borg. Mara does."
    answering(page, text, text)
    ask(page)
    assert text_of(page, ".answer > .said") == text
    assert text_of(page, ".claim.missing") == "4|Jonas Borg"
    assert text_of(page, ".answer > .note") == "Not in the sources: 4, Jonas Borg"
    assert text_of(page, "button.claim") == "Bergen"  # found
    click(page, "button.claim")
    page.until("document.querySelectorAll('#passage-text .current').length")
    assert "Bergen" in text_of(page, "#passage-text .current")


def test_the_same_answer_is_said_to_be_the_same(page: Page) -> None:
    answering(page, "The price is 45 euros.", "The price is 45 euros.")
    ask(page)
    click(page, ".compare")
    page.until(COMPARED)
    assert text_of(page, ".comparison [role=status]") == "The full prefill gives the same answer."
    assert page.js("document.querySelector('.comparison mark') === null")


def test_a_comparison_is_stopped(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(page)
    stopped, step = threading.Event(), EngineCore.step

    def held(core: EngineCore) -> Any:
        stopped.wait(60)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", held)
    click(page, ".compare")
    page.until("document.querySelector('.comparison') !== null")
    page.press("Escape")
    page.until("document.querySelector('.comparison') === null")
    stopped.set()
    assert page.js("document.activeElement.className") == "compare"
    assert not page.js("document.activeElement.disabled")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a b c", "a b c ", None),
        ("a b c", "a x c", {"word": 2, "parts": [["a ", "b c"], ["a ", "x c"]]}),
        ("a b", "a b c", {"word": 3, "parts": [["a b", ""], ["a b ", "c"]]}),
        ("", "a", {"word": 1, "parts": [["", ""], ["", "a"]]}),
        ("", "", None),
    ],
)
def test_the_first_difference_of_two_answers(page: Page, one: str, other: str, expected: Any) -> None:
    found = page.js(f"import('/page/comparison.js').then(m => m.difference({one!r}, {other!r}))")
    assert found == expected


def test_sources_are_numbered_by_rank(server: Any, page: Page) -> None:
    text = f"{LONG} Olaf hid the zebra. {LONG}"
    assert server.client.put("/v1/documents/diary", json={"text": text}).status_code == 201
    question = "who hid the zebra near the harbor?"
    ask(page, question)
    chunks = server.ask(messages=[{"role": "user", "content": question}], search={}).json()["blend"]["chunks"]
    by_rank = sorted(chunks, key=lambda chunk: chunk["rank"])
    assert by_rank != chunks  # the prompt has another order
    assert text_of(page, ".footnote .name").split("|") == [f"{c['title']}, {c['place']}" for c in by_rank]
    click(page, ".footnote")
    assert "Olaf hid the zebra" in text_of(page, "#passage-text .current")


def test_files_of_one_name_are_told_apart(server: Any, page: Page, tmp_path: Path) -> None:
    for city in ("Bergen", "Oslo", "Tromso"):
        (tmp_path / "docs" / city).mkdir(parents=True)
        (tmp_path / "docs" / city / "travel.md").write_text(f"The allowance in {city} is paid daily.")
    engine, store = server.state.engine, server.state.store
    engine.precompute(store, [str(tmp_path / "docs")], PrecomputeOptions(), lambda event: None)
    page.reload()
    page.until("document.querySelectorAll('#documents li').length === 5")
    paths = [f"docs/{city}/travel.md" for city in ("Bergen", "Oslo", "Tromso")]
    assert text_of(page, "#documents .name").split("|") == ["billing", "parrots", *paths]
    assert str(tmp_path) not in server.client.get("/v1/documents").text
    ask(page, "what allowance is paid daily in Tromso?")
    names = text_of(page, ".footnote .name").split("|")
    assert names[0].startswith("docs/Tromso/travel.md")
    assert {name.partition(",")[0] for name in names} <= set(paths)
    click(page, ".footnote")
    assert text_of(page, "#passage h2") == "1. docs/Tromso/travel.md"


def test_a_footnote_opens_the_document_at_the_passage(server: Any, page: Page) -> None:
    assert (
        server.client.put("/v1/documents/diary", json={"text": f"{LONG} Olaf hid the zebra. {LONG}"}).status_code == 201
    )
    ask(page, "who hid the zebra?")
    titles = text_of(page, ".footnote .name").split("|")
    first = next(i for i, title in enumerate(titles) if title.startswith("diary"))
    page.js(f"document.querySelectorAll('.footnote')[{first}].click()")
    num_chunks = len(server.client.get("/v1/documents/diary").json()["chunks"])
    page.until(f"document.querySelectorAll('#passage-text > div').length === {num_chunks}")
    assert page.js("document.getElementById('passage').open")
    whole = page.js("document.getElementById('passage-text').textContent")
    assert "Olaf hid the zebra." in whole
    assert whole.startswith(LONG)
    shown = "(({top: a, bottom: b}, {top: c, bottom: d}) => a < d && b > c)(...['#passage-text', '#passage-text .current'].map(s => document.querySelector(s).getBoundingClientRect()))"
    assert page.js(shown)
    kinds = page.js("[...new Set([...document.querySelectorAll('#passage-text span')].map(s => s.className))]")
    assert set(kinds) <= {"exact", "reused", "recomputed", "computed"}
    assert kinds
    page.press("Escape")
    assert not page.js("document.getElementById('passage').open")


def test_documents_write_nothing_into_the_page(page: Page) -> None:
    ask(page)
    page.js("document.querySelectorAll('.footnote')[1].click()")
    assert page.js("document.querySelector('#passage-text b') === null")
    click(page, "#passage-previous")
    texts = text_of(page, "#passage-text")
    assert any(text in texts for text in PAGES.values())


def test_files_are_dropped_and_documents_deleted(server: Any, page: Page) -> None:
    page.js(
        """window.seen = []; new MutationObserver(() => seen.push(document.getElementById("uploads").textContent))
            .observe(document.getElementById("uploads"), { subtree: true, childList: true, characterData: true });"""
    )
    drop(page, diary_txt=LONG, team_html="<h1>Team</h1><p>Olaf leads payroll.</p>", tool_exe="MZ", nothing_txt=" ")
    page.until("document.querySelectorAll('#uploads .error').length === 2")
    page.until("document.querySelectorAll('#documents li').length === 4")
    listed = server.client.get("/v1/documents").json()["data"]
    num_chunks = next(len(d["chunks"]) for d in listed if d["id"] == "diary.txt")
    assert num_chunks > 2
    seen = page.js("seen.join('|')")
    assert all(f"{n} of {num_chunks} chunks" in seen for n in (0, num_chunks))
    assert "tool.exe" in text_of(page, "#uploads")
    assert "team.html" not in text_of(page, "#uploads")
    page.js("window.confirm = () => true")
    click(page, "#documents li:first-child button")
    page.until("document.querySelectorAll('#documents li').length === 3")
    assert "billing" not in [d["id"] for d in server.client.get("/v1/documents").json()["data"]]
    ask(page, "who leads payroll?")
    assert "team.html" in text_of(page, ".footnote")


def test_what_is_left_out_is_shown_at_the_document(server: Any, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"deck.pptx": ["2 charts (slide 3)"], "book.xlsx": [f"{n} formulas (sheet {n})" for n in range(2, 7)]}
    leave_out(monkeypatch, losses)
    drop(page, deck_pptx="Olaf leads payroll.", book_xlsx=LONG)
    page.until("document.querySelectorAll('#documents .omissions').length === 2")
    page.until("document.querySelectorAll('#uploads li').length === 0")
    assert text_of(page, "#documents p.omissions") == "left out: 2 charts (slide 3)"
    first = "; ".join(losses["book.xlsx"][:3])
    assert text_of(page, "#documents .omissions summary") == f"left out: {first}; 2 more"
    assert page.js("document.querySelector('details.omissions p').checkVisibility()") is False
    click(page, "#documents .omissions summary")
    assert page.js("document.querySelector('details.omissions p').checkVisibility()") is True
    assert text_of(page, "#documents details.omissions p") == "|".join(losses["book.xlsx"][3:])
    assert page.js("document.getElementById('status').textContent").startswith("book.xlsx: ")
    assert page.js("document.getElementById('status').textContent").endswith(f"stored; left out: {first}; 2 more")
    ask(page, "who leads payroll with Olaf?")
    click(page, ".footnote")
    page.until("document.getElementById('passage-about').textContent.includes('left out: 2 charts (slide 3)')")


def test_answers_are_stopped_and_made_again(server: Any, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped, step = threading.Event(), threading.Event(), EngineCore.step

    def held_after_its_first_text(core: EngineCore) -> Any:
        if begun.is_set():  # an answer that ends by itself could not be stopped
            stopped.wait(60)
        events = step(core)
        if any(isinstance(event, Piece) for _, event in events):
            begun.set()
        return events

    monkeypatch.setattr(EngineCore, "step", held_after_its_first_text)
    page.js("document.getElementById('max_tokens').value = 900")
    page.type(QUESTION)
    page.press("Enter")
    page.until("document.querySelector('.running .said:last-child')?.textContent")
    page.press("Escape")
    page.until("document.querySelector('.turn:not(.running)')?.textContent.includes('Stopped.')")
    stopped.set()
    assert page.js("document.activeElement.id") == "question"
    page.js("document.getElementById('max_tokens').value = 4")
    click(page, ".regenerate")
    page.until(ANSWERED)
    assert page.js("document.querySelectorAll('.turn').length") == 1
    expected = server.ask("", messages=[{"role": "user", "content": QUESTION}], search={"k": 5}, max_tokens=4).json()
    assert text_of(page, ".answer > .said") == expected["choices"][0]["message"]["content"]


def test_conversations_are_kept_in_the_browser(server: Any, page: Page) -> None:
    ask(page)
    first = text_of(page, ".answer > .said")
    ask(page, "whose parrot is it?")
    page.until("document.querySelectorAll('.turn:not(.running)').length === 2")
    turns = [("user", QUESTION), ("assistant", first), ("user", "whose parrot is it?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = server.ask("", messages=messages, search={}, max_tokens=8).json()["choices"][0]["message"]["content"]
    assert text_of(page, ".turn:last-of-type .answer > .said") == expected
    page.press("O", control=True, shift=True)
    page.until("document.querySelectorAll('.turn').length === 0")
    ask(page, "where is the harbor?")
    page.reload()
    page.until("document.querySelectorAll('#conversations li').length === 2")
    assert text_of(page, "#conversations .name") == f"where is the harbor?|{QUESTION}"
    click(page, "#conversations li:last-child .name")
    assert page.js("document.querySelectorAll('.turn').length") == 2
    page.js("document.querySelectorAll('.footnote')[0].click()")
    assert page.js("document.querySelectorAll('#passage-text span').length") > 0
    click(page, "#passage-close")
    click(page, "#conversations li:last-child [aria-label^=Delete]")
    page.until("document.querySelectorAll('#conversations li').length === 1")
    page.js("window.confirm = () => true")
    click(page, "#clear")
    page.until("document.querySelectorAll('#conversations li').length === 0")
    assert page.js("Object.keys(localStorage).filter(k => k.includes('conversation')).length") == 0


def test_settings_are_shown_kept_and_sent(page: Page) -> None:
    assert page.js("document.getElementById('max_tokens').placeholder") == "8"
    assert page.js("document.getElementById('ratio').placeholder") == "model"
    assert page.js("document.getElementById('model').textContent")
    change = "e => { e[0].value = e[1]; e[0].dispatchEvent(new Event('input', { bubbles: true })); }"
    page.js(f"[['mode', 'full'], ['k', 1]].map(([id, v]) => [document.getElementById(id), v]).forEach({change})")
    page.reload()
    page.until("document.querySelectorAll('#documents li').length === 2")
    assert page.js("document.getElementById('mode').value") == "full"
    ask(page)
    assert page.js("document.querySelectorAll('.footnote').length") == 1
    assert "full" in text_of(page, ".figures")
    page.js("[['ratio', 7]].map(([id, v]) => [document.getElementById(id), v]).forEach(" + change + ")")
    page.type("who?")
    page.press("Enter")
    assert page.js("document.getElementById('settings').checkVisibility()")  # where the value is wrong
    assert page.js("document.querySelectorAll('.turn').length") == 1
    click(page, "#reset")
    assert page.js("document.getElementById('mode').value + document.getElementById('ratio').value") == ""


def test_a_question_that_finds_nothing_is_answered_without_documents(server: Any, page: Page) -> None:
    page.type("zebra")
    page.press("Enter")
    page.until("document.querySelector('.turn .error button')?.textContent")
    click(page, ".turn .error button")
    page.until("document.querySelector('.answer > .said')?.textContent && document.getElementById('stop').hidden")
    plain = server.ask("", messages=[{"role": "user", "content": "zebra"}], max_tokens=8).json()
    assert text_of(page, ".answer > .said") == plain["choices"][0]["message"]["content"]


def test_a_document_of_the_list_is_opened_with_the_keyboard_again_and_again(page: Page) -> None:
    page.js("document.querySelector('#documents a').focus()")
    for _ in range(2):
        page.press("Enter")
        page.until("document.querySelectorAll('#passage-text .current').length")
        assert text_of(page, "#passage-text").strip() == PAGES[text_of(page, "#documents a").split("|")[0]]
        page.press("Escape")
        page.until("!document.getElementById('passage').open")


def test_many_documents_are_filtered_by_title(server: Any, page: Page) -> None:
    assert page.js("document.getElementById('filter').hidden")
    for number in range(8):
        assert server.client.put(f"/v1/documents/Log {number}", json={"text": f"day {number}"}).status_code == 201
    page.reload()
    page.until("document.querySelectorAll('#documents li').length === 10")
    page.js("document.getElementById('filter').focus()")
    page.type("log 3")
    shown = "[...document.querySelectorAll('#documents li')].filter(e => e.checkVisibility()).map(e => e.textContent)"
    page.until(f"{shown}.length === 1")
    assert page.js(shown)[0].startswith("Log 3")


def test_themes(page: Page) -> None:
    def dark() -> bool:
        color = page.js("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) < 200

    page.theme("dark")
    assert dark()
    click(page, "#theme")
    assert not dark()
    click(page, "#theme")
    page.theme("light")
    assert dark()
    page.reload()
    assert dark()
    click(page, "#theme")
    assert not dark()


def test_it_is_read_on_a_narrow_screen(server: Any, page: Page) -> None:
    width = 320
    page.size(width, 700)
    ask(page)
    click(page, ".compare")
    page.until(COMPARED)
    click(page, "#show-settings")
    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("document.getElementById('documents').offsetParent === null")
    click(page, "#menu")
    assert page.js("document.getElementById('documents').offsetParent !== null")
    assert (
        page.js("Math.max(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().right))")
        <= width
    )
    page.press("Escape")
    assert page.js("document.activeElement.id") == "menu"


def test_controls_have_names_and_regions_are_landmarks(page: Page) -> None:
    ask(page)
    unnamed = """[...document.querySelectorAll("button, input, select, textarea, nav, dialog, [role=region]")].filter(e =>
        !e.ariaLabel && !e.textContent.trim() && !e.labels?.length && !document.getElementById(e.getAttribute("aria-labelledby"))?.id)"""
    assert page.js(f"{unnamed}.map(e => e.outerHTML)") == []
    assert page.js("['header', 'nav', '#chat'].every(s => document.querySelector(s).checkVisibility())")
    assert text_of(page, ".answer > .said") in page.js("document.querySelector('[aria-live]').textContent")


def test_nothing_is_shown_before_the_key(start: Any, browser: Browser) -> None:
    server = start(("plain-key-0000", "ada:ada-key-000000"))
    ada = {"Authorization": "Bearer ada-key-000000"}
    assert server.client.put("/v1/documents/secret", json={"text": PAGES["billing"]}, headers=ada).status_code == 201
    with Page(server.url.removesuffix("v1"), browser) as page:
        page.until("document.activeElement.id === 'key'")
        visible = "document.body.innerText"
        assert server.state.model not in page.js(visible)
        assert page.js("document.getElementById('app').hidden && document.getElementById('key-error').hidden")
        page.type("wrong-key-0000")
        page.press("Enter")
        page.until("!document.getElementById('key-error').hidden")
        page.type("ada-key-000000")
        page.press("Enter")
        page.until("document.querySelectorAll('#documents li').length === 1")
        ask(page, "who leads billing?")
        page.reload()  # the key is kept as long as the tab
        page.until("document.querySelectorAll('#conversations li').length === 1")
        click(page, "#forget-key")
        page.until("document.activeElement.id === 'key'")
        assert "billing" not in page.js("document.body.textContent")
        page.type("plain-key-0000")
        page.press("Enter")
        page.until("!document.getElementById('app').hidden")
        assert page.js("document.querySelectorAll('#conversations li').length") == 0
        assert "plain-key" not in page.js("JSON.stringify(localStorage)")


def test_the_page_asks_nobody_else(server: Any) -> None:
    reply = server.client.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    folder = Path(__file__).parents[2] / "cacheblend_cli/server/page"
    for file in folder.iterdir():
        part = server.client.get(f"/page/{file.name}")
        assert part.status_code == 200
        assert "http://" not in part.text
        assert "https://" not in part.text
    assert "javascript" in server.client.get("/page/page.js").headers["content-type"]
    for name in ("page.py", "..%2fapp.py", "%2e%2e/app.py"):
        assert server.client.get(f"/page/{name}").status_code == 404
