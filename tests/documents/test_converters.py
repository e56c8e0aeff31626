"""Files of every kind to text: the converted parts, their places in the file, and reasons of refusals."""

from __future__ import annotations

import os
import sys

import files
import pytest
from cacheblend_documents import conversion, formats
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.formats import format_of
from cacheblend_documents.office import package

from cacheblend_cli.corpus.cutting import Locating


def convert(name: str, data: bytes | str) -> Converted:
    return convert_here(name, data if isinstance(data, bytes) else data.encode())


def place_of(found: Converted, first: str, last: str = "") -> tuple[str, tuple[str, ...]]:
    """Return the place as shown to users, and the headings."""
    locator = Locating(found).find(found.text.index(first), found.text.index(last or first) + len(last or first))
    return locator.text, locator.headings


def test_every_kind_has_one_converter() -> None:
    for name in ("a.MD", "b.txt", "c.rst", "d.html", "e.csv", "f.tsv", "g.json", "h.jsonl", "i.py", "j.ipynb", "k.eml"):
        assert format_of(name) is not None
    for name in ("l.pdf", "m.docx", "n.pptx", "o.xlsx", "o.xls", "o.ods", "p.epub", "README", "Makefile", "a", "md"):
        assert format_of(name) is not None
    for name in ("q.xml", "r.tex", "s.bib", "t.mbox", "u.ics", "v.vcf", "w.mhtml"):
        assert format_of(name) is not None
    for name in ("a.png", "x.unknown"):
        assert format_of(name) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"From a Mon Mar  2 10:00:00 2026\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\n\nx\n", "# Grüße\n\nx\n\n"),
        (b"Received: a\n b\nMIME-Version: 1.0\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\n\nx\n", "# Grüße\n\nx\n\n"),
        (b"BEGIN:VCARD\nFN;QUOTED-PRINTABLE:Gr=C3=BC=C3=9Fe\nEND:VCARD\n", "# Grüße\n\n"),
        (b"BEGIN:VCALENDAR\nBEGIN:VEVENT\nSUMMARY:a\\, b\nEND:VEVENT\n", "Event: a, b"),
        ("<?xml version='1.0' encoding='latin-1'?><a>Grüße</a>".encode("latin-1"), "a: Grüße"),
        (b"From 10:00 to 11:30\nWhere: hall\n", "From 10:00 to 11:30\nWhere: hall\n"),
        (b"<!-- <?xml -->", "<!-- <?xml -->"),
    ],
)
def test_encoded_text_without_a_known_suffix_is_read_by_its_content(data: bytes, text: str) -> None:
    for name in ("saved", "saved.unknown"):
        assert conversion.convert(name, data).text.split() == text.split()
    plain = data.replace(b"\xfc\xdf", b"").rstrip() + b"\n"
    assert conversion.convert("saved.txt", plain).text.encode() == plain


def test_a_file_name_need_not_be_utf_8() -> None:
    assert conversion.convert(os.fsdecode(b"gr\xfc\xdfe.html"), b"<p>x").text.split() == ["x"]


PAGE = """<!doctype html><html><head><title>The  travel page</title><style>p { color: red }</style></head><body>
<header>Company <a href=/>home</a></header><nav><ul><li>Menu</li></ul></nav>
<main><h1>Travel</h1><p>Employees are
reimbursed <b>within</b> two&nbsp;weeks.<br>Always.</p>
<h2>Rates <a class="headerlink" href="#r">&para;</a></h2>
<table><tr><th>city</th><th>rate</th></tr><tr><td>Bergen</td><td>90</td></tr></table>
<ul><li>first</li><li><p>second</p></li></ul><pre>x = 1
y = 2</pre><p>Use <code>plan</code>.</p><script>alert(1)</script></main><footer>Imprint</footer></body></html>"""


def test_html_is_its_main_text() -> None:
    found = convert("a.html", PAGE)
    assert found.title == "The travel page"
    assert found.text == (
        "# Travel\n\nEmployees are reimbursed within two weeks.\nAlways.\n\n## Rates\n\ncity | rate\nBergen | 90\n\n"
        "- first\n- second\n\n```\nx = 1\ny = 2\n```\n\nUse `plan`.\n"
    )
    assert place_of(found, "Bergen") == ("", ("Travel", "Rates"))


def test_html_without_a_main_part_is_its_body_and_any_encoding_is_read() -> None:
    page = "<meta charset=iso-8859-1><body><nav>no</nav>Grüße <div>two<div>three</div></div>"
    assert convert("a.htm", page.encode("latin-1")).text == "Grüße\n\ntwo\n\nthree\n"
    assert convert("a.htm", "<p>x" * 3000).text.count("x") == 3000
    assert "deep" in convert("a.htm", "<div>" * 5000 + "deep").text
    assert "deep" in convert("a.htm", "<span>" * 5000 + "deep").text


def test_rows_of_tables_tell_their_columns_and_their_lines() -> None:
    found = convert("a.csv", 'name,city\r\nMara,"Bergen,\nNorway"\r\n\r\nAda,\r\nBo,Oslo,extra\r\n')
    assert found.text == "name, city\nname: Mara, city: Bergen, Norway\nname: Ada\nname: Bo, city: Oslo, extra\n"
    assert place_of(found, "Mara")[0] == "line 2"
    assert place_of(found, "Ada", "extra")[0] == "lines 5-6"
    assert convert("a.csv", "a;b\n1;2\n").text == "a, b\na: 1, b: 2\n"
    assert convert("a.tsv", "a\tb\n1, 2\t3\n").text == "a, b\na: 1, 2, b: 3\n"


@pytest.mark.parametrize("html", [False, True])
def test_mail_says_who_wrote_what(html: bool) -> None:
    found = convert("a.eml", files.mail(html=html))
    assert found.text.startswith("# Größe of it\n\nFrom: Mara <mara@example.org>\nTo: ada@example.org\nDate: Mon")
    assert "Attached: plan.bin\n\nDear Ada," in found.text
    assert "<p>" not in found.text


def test_office_files_and_books() -> None:
    found = convert("a.docx", files.docx())
    assert found.text == "# Travel\n\nWithin two weeks.\n\ncity | rate\nBergen | 90\n"
    found = convert("a.pptx", files.pptx())
    assert found.text == "# Plans\n\nFirst point\nSecond point\n\nNotes: Speak slowly.\n\nBergen | 90\n\n"
    assert place_of(found, "Bergen")[0] == "slide 2"
    found = convert("a.xlsx", files.xlsx())
    assert found.text == "# People\n\nname, city\nname: Mara, city: Bergen\nname: Ada\n\n# Budget\n\ntotal, 12.5\n\n"
    assert place_of(found, "Mara") == ("sheet People", ("People",))
    found = convert("a.epub", files.epub(["<h1>One</h1><p>a</p>", "", "<h1>Two</h1><p>b</p>"]))
    assert found.text == "# One\n\na\n\n# Two\n\nb\n\n"
    assert place_of(found, "b") == ("chapter 2", ("Two",))


@pytest.mark.parametrize("suffix", [".pdf", ".docx", ".pptx", ".xlsx", ".epub", ".ipynb"])
@pytest.mark.parametrize("data", [b"", b"no such file\n", b"%PDF-1.4\ntrash", files.packed({"a.txt": "x"})])
def test_broken_files_are_refused_with_a_reason(suffix: str, data: bytes) -> None:
    with pytest.raises(NotConverted) as refused:
        convert(f"a{suffix}", data)
    assert refused.value.group in ("damaged or locked", "broken notebooks", "binary")


def test_an_archive_that_unpacks_to_too_much_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_MOST_UNPACKED", 1 << 20)
    packed = files.packed({f"{n}": "\0" * (600 << 10) for n in range(2)})
    with pytest.raises(NotConverted) as refused:
        convert("a.docx", packed)
    assert refused.value.group == "too large unpacked"


@pytest.mark.parametrize(
    ("suffix", "package"),
    [(".pdf", "pypdfium2"), (".docx", "defusedxml"), (".pptx", "defusedxml"), (".ods", "python_calamine")],
)
def test_without_its_library_a_file_names_what_to_install(
    suffix: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats._imported.cache_clear()
    monkeypatch.delitem(sys.modules, "cacheblend_documents.pdf.pages", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NotConverted, match="pip install") as refused:
        convert(f"a{suffix}", b"x")
    assert refused.value.unread, "what was stored of it stays"
