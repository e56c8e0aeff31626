"""Reasons for refusing damaged files are words for people, whatever the parser's error says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import files
import pytest
from cacheblend_documents.conversion import convert, converter_process
from cacheblend_documents.converted import NotConverted, refusing_damage
from cacheblend_documents.limited_process import LimitedProcess
from damaging import damaged

NOT_FOR_PEOPLE = re.compile(
    r"""[<>{}\[\]'"\\_=]|0x|\w/|/\w|::|\.py|[a-z]{2}[A-Z]|Error|Exception|Traceback|None|object|line \d+, column"""
)
"""Signs of a repr, a path, a class or a traceback."""
KINDS: dict[str, Callable[[], bytes]] = {
    "a.pdf": lambda: files.pdf(["Mara leads billing.", "Jonas keeps a parrot."]),
    "a.docx": files.docx,
    "a.pptx": files.pptx,
    "a.xlsx": files.xlsx,
    "a.epub": lambda: files.epub(["<h1>One</h1><p>a</p>", "<h1>Two</h1><p>b</p>"]),
    "a.eml": files.mail,
    "a.mbox": lambda: b"From a Mon Mar  2 10:00:00 2026\n" + files.mail() + b"\n",
    "a.vcf": lambda: b"BEGIN:VCARD\nFN:Mara\nTEL;HOME:218\nEND:VCARD\n",
    "a.xml": lambda: b"<book><title>Pool</title><para>The key is <b>4711</b>.</para></book>",
    "a.tex": lambda: b"\\section{Pool}\nThe key is 4711, \\'{e}. % old\n",
    "a.ipynb": files.notebook,
    "a.json": lambda: b'[{"id": "f1", "text": "Billing is in Bergen."}]',
    "a.jsonl": lambda: b'{"id": 1, "text": "Who leads?"}\n{"id": 2, "text": "Ada leads."}\n',
    "a.csv": lambda: b"name,city\nMara,Bergen\n",
    "a.html": lambda: b"<main><h1>Page</h1><p>The desk is at home.</p></main>",
}


@pytest.fixture(scope="module")
def converting() -> Iterator[LimitedProcess]:
    converting = converter_process()
    yield converting
    converting.close()


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_in_words(name: str, converting: LimitedProcess) -> None:
    reasons, omissions = list[str](), list[str]()
    for data in damaged(KINDS[name]()):
        try:
            omissions += convert(name, data, process=converting).omissions
        except NotConverted as no:
            reasons.append(no.reason)
    assert reasons or name in ("a.csv", "a.eml", "a.html", "a.json")
    assert [reason for reason in reasons if NOT_FOR_PEOPLE.search(reason) or len(reason) > 120] == []
    assert [text for text in omissions if re.search(r"Error|Traceback|0x", text)] == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("xl/styles.xml"), "damaged, with a password, or not what its name says"),
        (AttributeError(), "damaged, with a password, or not what its name says"),
        (OSError(2, "x"), "damaged, with a password, or not what its name says"),
        (RecursionError("maximum recursion depth exceeded"), "is nested too deeply"),
    ],
)
def test_the_words_of_a_parser_are_not_shown(error: Exception, reason: str) -> None:
    with pytest.raises(NotConverted) as refused, refusing_damage():
        raise error
    assert refused.value.reason == reason


def test_too_little_memory_is_not_called_damage() -> None:
    with pytest.raises(MemoryError), refusing_damage():
        raise MemoryError
