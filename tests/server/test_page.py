"""The page, in a browser: asked without a mouse, read on a narrow screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browser import Page

PAGES = {
    "billing": "the lead of billing is Mara and she works in Bergen, near the harbor, with a parrot at home",
    "parrots": "Jonas keeps a parrot at home <b>in Bergen</b> near the harbor",
}


def stored(server: Any) -> None:
    for name, text in PAGES.items():
        assert server.client.put(f"/v1/documents/{name}", json={"text": text}).status_code == 201


def test_a_question_is_asked_with_the_keyboard(server: Any, tmp_path: Path) -> None:
    stored(server)
    with Page(server.url.removesuffix("v1"), tmp_path / "profile") as page:
        assert page.js("document.activeElement.id") == "question"
        assert page.js("document.getElementById('key').offsetParent === null")  # no key is needed here
        page.type("who keeps a parrot in Bergen?")
        page.press("Enter")
        page.until(
            "document.querySelectorAll('#sources li').length === 2 && !document.getElementById('verify').disabled"
        )
        answer = page.js("document.getElementById('answer').textContent")
        expected = server.ask(
            "", messages=[{"role": "user", "content": "who keeps a parrot in Bergen?"}], search={"k": 5}, max_tokens=8
        )
        assert answer == expected.json()["choices"][0]["message"]["content"]
        texts = page.js("[...document.querySelectorAll('.text')].map(p => p.textContent).join('|')")
        assert all(text in texts for text in PAGES.values())  # as text: no document writes into the page
        assert set(page.js("[...document.querySelectorAll('.badge')].map(b => b.textContent)")) == {"exact", "blended"}
        how = page.js("[...new Set([...document.querySelectorAll('.text span')].map(s => s.className))].sort().join()")
        assert how == "exact,recomputed,reused"
        assert page.js("document.querySelectorAll('#layers span').length") == 4
        figures = page.js("document.getElementById('figures').textContent")
        assert "First token" in figures
        assert "Full prefill" not in figures  # it is shown where it was measured
        for _ in range(8):  # Tab reaches the button
            page.press("Tab")
            if page.js("document.activeElement.id") == "verify":
                break
        page.press(" ")
        page.until("document.getElementById('figures').textContent.includes('KL to it')")


def test_it_is_read_on_a_narrow_screen(server: Any, tmp_path: Path) -> None:
    stored(server)
    with Page(server.url.removesuffix("v1"), tmp_path / "profile", width=375, height=800) as page:
        page.type("who keeps a parrot in Bergen?")
        page.press("Enter")
        page.until("document.querySelectorAll('#sources li').length === 2")
        assert page.js("document.documentElement.scrollWidth") <= 375
        unnamed = "[...document.querySelectorAll('button, input, select, textarea')].filter(e => !e.hidden && !e.textContent && !e.labels.length)"
        assert page.js(f"{unnamed}.length") == 0


def test_what_fails_is_told(start: Any, tmp_path: Path) -> None:
    server = start(("plain-key-0000",))
    with Page(server.url.removesuffix("v1"), tmp_path / "profile") as page:
        page.type("who?")
        page.press("Enter")
        page.until("!document.getElementById('error').hidden")
        assert "API key" in page.js("document.getElementById('error').textContent")
        assert page.js("document.activeElement.id") == "key"
        page.type("plain-key-0000")
        page.press("Enter")
        page.until("document.getElementById('error').textContent.includes('no stored chunk')")


def test_the_page_asks_nobody_else(server: Any) -> None:
    reply = server.client.get("/")
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    for part in ("", "page.css", "page.js"):
        text = server.client.get(f"/{part}").text
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text
    assert server.client.get("/page.py").status_code == 404
