"""The CPU time of hostile documents grows in proportion to their size."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import growing
import pytest
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import NotConverted
from checkpoints import write_tokenizer
from ledger import Ledger

from cacheblend_cli.corpus.chunker import Encode
from cacheblend_cli.corpus.cutting import CutSettings, cut_document
from cacheblend_cli.corpus.documents import Document, read_documents
from cacheblend_cli.model.tokenizer import Tokenizer

GROWTH = 3.0  # most growth of the time when the size doubles
SHORTEST_S = 0.1  # shorter times are noise
LONGEST_S = 1.0  # where the doubling ends
LARGEST = 1 << 24
RUNS = 3
DOCUMENTS: dict[str, tuple[str, Callable[[int], str]]] = {
    "blank lines before a bracket": ("a.py", lambda n: "x\n" + "\n" * n + "}\n"),
    "indented blank lines": ("a.py", lambda n: "x\n" + "  \n" * (n // 3) + "    }\n"),
    "blanks in headings": ("a.md", lambda n: ("# a" + " " * 396 + "x\n") * (n // 400)),
    "marks in headings": ("a.md", lambda n: ("# a" + " #" * 198 + "x\n") * (n // 400)),
    "headings alone": ("a.md", lambda n: "# a\n" * (n // 4)),
    "blanks before a heading": ("a.md", lambda n: " " * n + "\n# a\n"),
    "underlines": ("a.rst", lambda n: "abc\n---\n" * (n // 8)),
    "deep definitions": ("a.py", lambda n: "".join(" " * (i % 300) + "def a():\n" for i in range(n // 158))),
    "modifiers": ("a.py", lambda n: ("pub(" * 90 + "\n") * (n // 361)),
    "one line of words": ("a.txt", lambda n: "lead billing " * (n // 13)),
    "one line of code": ("a.py", lambda n: "def f():\n    " + "x; " * (n // 3)),
    "one word": ("a.txt", lambda n: "x" * n),
    "blanks": ("a.txt", lambda n: " " * n),
    "line ends": ("a.txt", lambda n: "\n" * n),
    "marks": ("a.txt", lambda n: "!?. " * (n // 4)),
    "emoji": ("a.txt", lambda n: "\U0001f600" * (n // 4)),
    "broken JSON": ("a.json", lambda n: '{"a": "' + '\\"' * (n // 2)),
    "deep JSON": ("a.json", lambda n: "[" * n),
    "a long id of a record": (
        "a.json",
        lambda n: '[{"id": "' + "I" * (n // 2) + '", "text": "' + "word " * (n // 10) + '"}]',
    ),
    "records": ("a.jsonl", lambda n: '{"text": "a"}\n' * (n // 14)),
    "wide HTML": ("a.html", lambda n: "<p>a" * (n // 4)),
    "elements of lines in HTML": ("a.html", lambda n: ("<b><i>" * 50 + "<p>x</p>" + "</i></b>" * 50) * (n // 708)),
    "links in HTML": ("a.html", lambda n: "<a href=https://x.example>a</a>" * (n // 32)),
    "struck-out text in HTML": ("a.html", lambda n: "<s>a</s> <del>b<p>c</del>" * (n // 26)),
    "superscripts in HTML": ("a.html", lambda n: "<sup>1</sup>" * (n // 12)),
    "cells of HTML that span rows": ("a.html", lambda n: "<table>" + "<tr><td rowspan=65534 colspan=9>a" * (n // 32)),
    "self-closing elements of XHTML": ("a.xhtml", lambda n: "<?xml version='1.0'?>" + "<a b/>x" * (n // 7)),
    "mails of a mailbox": ("a.mbox", lambda n: "From a Mon Mar  2 10:00\nSubject: b\n\n" * (n // 36)),
    "quoted lines of contacts": (
        "a.vcf",
        lambda n: "QUOTED-PRINTABLE" * (n // 32) + "\n" + "A;QUOTED-PRINTABLE:=\n" * (n // 44),
    ),
    "elements of XML": ("a.xml", lambda n: "<a>" + "<b>x<c/></b>" * (n // 12) + "</a>"),
    "lists in XML": ("a.xml", lambda n: "<p>t<q><i/>" * 200 + "<p>x<b>y</b></p>" * (n // 16) + "</q></p>" * 200),
    "open braces in LaTeX": ("a.tex", lambda n: "\\emph{a {b}" * (n // 11)),
    "open brackets in LaTeX": ("a.tex", lambda n: "\\a[" * (n // 3)),
    "blanks in LaTeX": ("a.tex", lambda n: " " * n + "a"),
    "control sequences": ("a.log", lambda n: "\x1b[" * (n // 4) + "\x1b]" * (n // 4)),
    "line ends in HTML": ("a.html", lambda n: "<pre>" + "\n" * n + "a"),
    "a long HTML title": ("a.html", lambda n: "<title>" + "a " * (n // 2) + "</title><p>text"),
    "tables side by side": ("a.csv", lambda n: "a,b,," * (n // 10) + "\n" + "x,1,," * (n // 10)),
    "empty rows": ("a.csv", lambda n: "a,b\n1,2\n" + "\n\n1,2\n" * (n // 6)),
    "data URIs": ("a.md", lambda n: "data:image/png;base64," + "data:a/b;" * (n // 9)),
    "fields of a record": (
        "a.jsonl",
        lambda n: '{"text": "a", "b": {' + ", ".join(f'"k{i}": 1' for i in range(n // 12)) + "}}",
    ),
    "groups in RTF": ("a.rtf", lambda n: "{\\rtf1 " + "{\\field{" * (n // 8) + "a"),
    "links in RTF": (
        "a.rtf",
        lambda n: "{\\rtf1 " + "{\\field{\\*\\fldinst HYPERLINK http://a.b}{\\fldrslt \\strike c}}" * (n // 62),
    ),
    "font tables in RTF": ("a.rtf", lambda n: "{\\rtf1 " + "{\\fonttbl\\f0\\fcharset0 " * (n // 23)),
    "paragraphs in RTF": ("a.rtf", lambda n: "{\\rtf1 " + "a\\par{\\footnote b}" * (n // 19) + "}"),
    "parameters of a mail": ("a.eml", lambda n: 'Subject: x\nContent-Type: text/plain; "' + ";" * n + "\n\nx"),
    "encoded words of a mail": ("a.eml", lambda n: "Subject: " + "=?x?q?" * (n // 6) + "\n\nx"),
    "parts of a mail": (
        "a.eml",
        lambda n: "Subject: x\nContent-Type: multipart/mixed; boundary=b\n\n" + "--b\n\nx\n" * (n // 7),
    ),
    "flowed lines of a mail": (
        "a.eml",
        lambda n: "Subject: x\nContent-Type: text/plain; format=flowed\n\n" + "a \n" * (n // 3),
    ),
    "lines of a calendar": (
        "a.eml",
        lambda n: "Subject: x\nContent-Type: text/calendar\n\nBEGIN:VEVENT\nSUMMARY:a\n" + " b\n" * (n // 3),
    ),
    "tables of Markdown": ("a.md", lambda n: "a|b\n-|-\n1|2\n\n" * (n // 13)),
    "rows of Markdown": ("a.md", lambda n: "lead billing is " * 4 + "|b\n-|-\n" + "a|b\n" * (n // 4)),
    "cells of Markdown": ("a.md", lambda n: "ab|" * (n // 9) + "\n" + "-|" * (n // 9) + "\n" + "x|" * (n // 9)),
    "cells of HTML": ("a.html", lambda n: "<table><tr><td>k<td>v" + ("<tr><td>x" + "<td>" * (n // 8) + "<td>z") * 2),
    "names in a cell": ("a.csv", lambda n: 'a,b\n1,"' + ", a: : : " * (n // 9) + '"\n2,3\n'),
    "columns": ("a.csv", lambda n: "a," * (n // 2) + "\n" + "1," * (n // 2)),
}
"""Kind -> name of the file, and its text of about n characters."""
RULES: dict[str, Callable[[int], str]] = {
    "stars in an ignore file": lambda n: "*a" * (n // 2) + "b\n",
    "patterns in an ignore file": lambda n: "".join(f"a{i:06}\n" for i in range(n // 8)),
}


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Encode:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path).encode_text


def best(act: Callable[[int], object], size: int) -> float:
    """Return the CPU time of the fastest run, in seconds."""
    times = []
    for _ in range(RUNS):
        begun = time.process_time()
        act(size)
        times.append(time.process_time() - begun)
    return min(times)


def check(kind: str, act: Callable[[int], object]) -> None:
    """Double the size until a run takes long."""
    size, before, compared = 1 << 12, 0.0, 0
    while size <= LARGEST and before < LONGEST_S:
        taken = best(act, size)
        if before >= SHORTEST_S:
            if taken > GROWTH * before:  # a busy machine: look again
                before, taken = min(before, best(act, size // 2)), min(taken, best(act, size))
            assert taken <= GROWTH * before, f"{kind}: {before:.2f} s, then {taken:.2f} s for {size:,} characters"
            compared += 1
        size, before = 2 * size, taken
    Ledger().add(
        f"time of hostile documents: {kind}", characters=size // 2, doublings=compared, seconds=round(before, 2)
    )


@pytest.mark.torture
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents_take_linear_time(kind: str, encode: Encode) -> None:
    name, text = DOCUMENTS[kind]

    def cut(size: int) -> None:
        converted = convert_here(name, text(size).encode())
        document = Document(name, converted)
        for _ in cut_document(document, encode, CutSettings(256, 32)):
            pass

    check(kind, cut)


@pytest.mark.torture
@pytest.mark.parametrize("kind", growing.FILES)
def test_files_of_many_parts_take_linear_time(kind: str) -> None:
    made = lru_cache(2)(growing.FILES[kind])

    def convert(size: int) -> None:
        with suppress(NotConverted):
            convert_here(f"a.{kind.rpartition(' ')[2]}", made(size))

    check(kind, convert)


@pytest.mark.torture
@pytest.mark.parametrize("kind", RULES)
def test_ignore_files_take_linear_time(kind: str, tmp_path: Path) -> None:
    (tmp_path / ("a" * 100 + ".md")).write_text("text\n")

    def walk(size: int) -> None:
        (tmp_path / ".gitignore").write_text(RULES[kind](size))
        list(read_documents([str(tmp_path)]))

    check(kind, walk)
