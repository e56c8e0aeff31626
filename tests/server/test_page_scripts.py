"""Markup in names, titles, texts, questions and answers does not become part of a page, and no script in it runs.

The browser ignores the pages' content security policy here, so only the escaping of text protects them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import Browser, Page
from omitting import leave_out

HOSTILE = "<img src=x onerror=ran()>"
ANSWERED = "document.getElementById('stop').hidden && document.querySelectorAll('.footnote').length"
INJECTED = "[...document.querySelectorAll('img, [onerror]')].map(e => e.outerHTML)"
SCRIPT = "window.runs = 0; window.ran = () => { window.runs += 1; };"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def check(page: Page, *selectors: str) -> None:
    """The text is shown there as text, and it is nowhere markup."""
    for selector in selectors:
        shown = page.js(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent).join()")
        assert HOSTILE in shown, selector
    assert page.js(INJECTED) == []
    assert page.js("window.runs ?? 0") == 0


def test_the_browser_runs_such_scripts(server: Any, browser: Browser) -> None:
    """Otherwise the other tests could not fail."""
    with Page(server.url.removesuffix("v1"), browser, ignore_policy=True) as page:
        page.js(SCRIPT)
        page.js(f"document.body.insertAdjacentHTML('beforeend', {HOSTILE!r})")
        page.until("window.runs === 1")
        assert page.js(INJECTED) != []


def test_no_script_of_a_document_or_an_answer_runs_in_the_page(
    server: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch, {f"{HOSTILE}.txt": [HOSTILE] * 5})
    for number in range(2):
        body = {"text": f"Jonas keeps a parrot {HOSTILE} in room {number}.", "title": f"{HOSTILE} {number}"}
        name = quote(f"{number} {HOSTILE}", safe="")
        assert server.client.put(f"/v1/documents/{name}", json=body).status_code == 201
    with Page(server.url.removesuffix("v1"), browser, ignore_policy=True) as page:
        page.until("document.querySelectorAll('#documents li').length === 2")
        page.js(SCRIPT)
        check(page, "#documents li")
        page.js(
            f"""(() => {{
                const data = new DataTransfer(), send = window.fetch;
                for (const suffix of [".txt", ".exe"]) data.items.add(new File(["Olaf {HOSTILE}"], {HOSTILE!r} + suffix));
                document.body.dispatchEvent(new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }}));
                window.fetch = (url, options) => send(url, !`${{url}}`.endsWith("/chat/completions") ? options :
                    {{ ...options, body: JSON.stringify({{ ...JSON.parse(options.body), regex:
                        (options.body.includes('"full"') ? "Olaf " : "") + {json.dumps(re.escape(HOSTILE))} }}) }});
            }})()"""
        )
        page.until("document.querySelectorAll('#documents li').length === 3")
        page.until("document.querySelectorAll('#uploads .error').length === 1")
        check(page, "#uploads .name", "#documents .omissions summary", "#documents .omissions p")
        page.js("document.getElementById('max_tokens').value = 60")
        page.js("document.getElementById('question').focus()")
        page.type(f"who keeps a parrot? {HOSTILE}")
        page.press("Enter")
        page.until(ANSWERED)
        check(page, ".question", ".answer > .said", ".footnote", "#conversations .name", "[aria-live]")
        page.js("document.querySelector('.compare').click()")
        page.until("document.querySelector('.comparison mark') !== null")
        check(page, ".comparison mark")
        page.js("document.querySelector('.footnote').click()")
        page.until("document.querySelectorAll('#passage-text > div').length")
        check(page, "#passage-text", "#passage h2")


def test_no_script_of_a_document_or_an_answer_runs_in_an_exported_page(
    cli: Any, browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / f"{HOSTILE}.md").write_text(f"# {HOSTILE}\n\nJonas keeps a parrot {HOSTILE} at home.\n")
    assert cli("precompute", f"{HOSTILE}.md").code == 0
    asked = ("ask", f"who keeps a parrot? {HOSTILE}", "--html", "answer.html", "--max-tokens", "60")
    done = cli(*asked, "--regex", re.escape(HOSTILE))
    assert (done.code, done.out) == (0, f"{HOSTILE}\n"), done.err
    with Page((tmp_path / "answer.html").as_uri(), browser, ignore_policy=True) as page:
        page.until("document.readyState === 'complete'")
        check(page, "title", "h1", ".answer", "summary", ".text")
