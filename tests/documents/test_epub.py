"""Books: the chapters that are there are read, and the others are named."""

from __future__ import annotations

import books
import hostile
import pytest
from books import book, page
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.web.epub import from_epub

ROSES, TULIPS = page("<h1>Roses</h1><p>Cut in March."), page("<h1>Tulips</h1><p>Plant in October.")
BOTH = "# Roses\n\nCut in March.\n\n# Tulips\n\nPlant in October.\n\n"
AES = "http://www.w3.org/2001/04/xmlenc#aes128-cbc"


def read(data: bytes) -> tuple[str, tuple[str, ...]]:
    """Return text and omissions."""
    found = from_epub(data)
    return found.text, found.omissions


def test_a_book_has_its_title_and_its_chapters() -> None:
    found = from_epub(book({"a.xhtml": ROSES, "b.xhtml": TULIPS}))
    assert (found.text, found.title, found.omissions) == (BOTH, "Garden Book", ())
    assert [mark.part for mark in found.marks] == ["chapter 1", "chapter 2"]


def test_missing_chapters_are_named() -> None:
    assert read(book({"a.xhtml": ROSES, "b.xhtml": None, "c.xhtml": TULIPS})) == (
        BOTH,
        ("1 chapter is missing (b.xhtml)",),
    )
    spine = '<itemref idref="c0"/><itemref idref="x"/><itemref/><itemref idref="c1"/>'
    assert read(book({"a.xhtml": ROSES, "b.xhtml": TULIPS}, spine=spine)) == (BOTH, ("2 chapters are missing (x)",))


def test_a_damaged_chapter_is_named() -> None:
    data = book({"a.xhtml": ROSES, "b.xhtml": "x" * 64 + "unpacked", "c.xhtml": TULIPS})
    place = data.index(b"OEBPS/b.xhtml") + len("OEBPS/b.xhtml")
    assert read(data[:place] + b"\xff" * 8 + data[place + 8 :]) == (BOTH, ("1 chapter cannot be read (b.xhtml)",))


def test_a_book_without_chapters_is_refused() -> None:
    with pytest.raises(NotConverted, match="2 chapters are missing"):
        convert_here("a.epub", book({"a.xhtml": None, "b.xhtml": None}))


@pytest.mark.parametrize("name", ["META-INF/container.xml", "OEBPS/book.opf"])
@pytest.mark.parametrize("content", ["<broken", "<x/>"])
def test_a_book_is_read_without_its_list_of_chapters(name: str, content: str) -> None:
    text, omissions = read(hostile.with_files(book({"b.xhtml": TULIPS, "a.xhtml": ROSES}), {name: content}))
    assert sorted(text.split("\n\n")) == sorted(BOTH.split("\n\n"))
    assert omissions == (("the order of the chapters is unknown",) if name == "OEBPS/book.opf" else ())


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ("iso-8859-1", "latin-1"),
        ("utf-16", "utf-16"),
        ("utf-16", "utf-16-le"),
        ("", "utf-8-sig"),
        ("windows-1251", "cp1251"),
        ("x", "utf-8"),
    ],
)
def test_chapters_have_the_encoding_that_they_declare(declared: str, encoding: str) -> None:
    words = "Март" if encoding == "cp1251" else "März"
    assert read(book({"a.xhtml": page(f"<p>{words}", declared).encode(encoding)})) == (f"{words}\n\n", ())


def test_characters_of_another_encoding_are_said() -> None:
    text, omissions = read(book({"a.xhtml": page("<p>März").encode("latin-1")}))
    assert (text, omissions) == ("März\n\n", ("its encoding is not declared; read as windows-1252",))
    text, omissions = read(book({"a.xhtml": ROSES, "b.xhtml": page("<p>Стоимость парковки").encode("cp1251")}))
    assert omissions == ("1 chapter cannot be read (b.xhtml)",)


def test_elements_that_close_themselves_end() -> None:
    chapter = "<html><head><title/><script src='x.js'/></head><body><h1>Roses</h1><p>Cut in March.</p></body></html>"
    assert read(book({"a.xhtml": chapter})) == ("# Roses\n\nCut in March.\n\n", ())


@pytest.mark.parametrize(
    "others", [books.encryption(AES, "OEBPS/a.xhtml"), {"META-INF/encryption.xml": "<encryption/>"}]
)
def test_an_encrypted_book_is_refused(others: dict[str, str]) -> None:
    with pytest.raises(NotConverted) as refused:
        from_epub(book({"a.xhtml": bytes(range(256)) * 20}, others=others))
    assert refused.value.group == "encrypted books"


def test_encrypted_chapters_are_named_and_obfuscated_fonts_are_ignored() -> None:
    data = book(
        {"a.xhtml": ROSES, "x.xhtml": b"\0\1", "b.xhtml": TULIPS}, others=books.encryption(AES, "OEBPS/x.xhtml")
    )
    assert read(data) == (BOTH, ("1 chapter is encrypted (x.xhtml)",))
    fonts = books.encryption("http://www.idpf.org/2008/embedding", "OEBPS/a.xhtml")
    assert read(book({"a.xhtml": ROSES, "b.xhtml": TULIPS}, others=fonts)) == (BOTH, ())


def test_a_chapter_in_another_format_is_read_from_its_fallback() -> None:
    opf = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="p" href="p.svg" media-type="image/svg+xml" fallback="a"/>'
        '<item id="a" href="a.xhtml" media-type="application/xhtml+xml"/></manifest><spine><itemref idref="p"/></spine></package>'
    )
    data = hostile.with_files(book({"a.xhtml": ROSES, "p.svg": "<svg/>"}), {"OEBPS/book.opf": opf})
    assert read(data) == ("# Roses\n\nCut in March.\n\n", ())
