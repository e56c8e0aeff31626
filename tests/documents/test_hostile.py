"""Hostile files: bounded time and memory, a reason for each refusal, and the next file is read as if nothing had
happened."""

from __future__ import annotations

import io
import re
import signal
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import files
import growing
import hostile
import pytest
import slides
import word_files
import workbooks
from cacheblend_documents.conversion import Limits, _refusal, convert, convert_here, converter_process
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.limited_process import LimitedProcess, ProcessEnded
from cacheblend_documents.office import package
from cacheblend_documents.sheets.merged_cells import MergedCells
from killing import killed_at_work

GOOD = b"<p>Within two weeks."
MIB = 1 << 20


@pytest.fixture
def process() -> Iterator[LimitedProcess]:
    process = converter_process()
    yield process
    process.close()


def converted(process: LimitedProcess, name: str, data: bytes) -> Converted:
    return convert(name, data, process=process)


def refused(process: LimitedProcess, name: str, data: bytes, limits: Limits | None = None) -> str:
    """The reason for which the file is not read; the next one is."""
    with pytest.raises(NotConverted) as error:
        convert(name, data, limits, process=process)
    assert converted(process, "good.html", GOOD).text == "Within two weeks.\n"
    return error.value.reason


def limited(**limits: float) -> Limits:
    return Limits(**{"seconds_per_mib": 0, "memory_per_byte": 0, **limits})  # type: ignore[arg-type]


def test_a_file_that_takes_too_long_is_given_up(process: LimitedProcess) -> None:
    assert refused(process, "a.html", b"<div>" * 50_000, limited(seconds=0.5)).startswith(
        "takes more than 0 s to convert"
    )


@pytest.mark.parametrize("page", [b"<p" + b"".join(b" a%d" % n for n in range(400_000)), b"<div>" * 150_000])
def test_html_that_is_slow_to_parse_is_refused_long_before_the_limit(page: bytes, process: LimitedProcess) -> None:
    assert refused(process, "a.html", page).startswith("its HTML takes too long to parse")


def test_a_file_that_takes_too_much_memory_is_given_up(process: LimitedProcess) -> None:
    names = b",".join(b"n" * 200 + b"%d" % n for n in range(1000))
    wide = names + b"\n" + (b"1," * 1000 + b"\n") * 4000  # a gigabyte: each row tells the columns' names
    assert refused(process, "a.csv", wide, limited(memory=300 * MIB)) == "needs more than 300 MiB of memory to convert"


def test_a_text_beyond_all_bounds_is_refused(process: LimitedProcess) -> None:
    assert refused(process, "a.html", b"a" * 2 * MIB, limited(characters=MIB)) == "has more than 1 MB of text"


def test_a_converter_that_crashes_is_a_reason(process: LimitedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(process, "a.html", GOOD)
    with killed_at_work(process, monkeypatch), pytest.raises(NotConverted, match=r"crashed \(signal 9\)"):
        converted(process, "a.html", GOOD)
    assert converted(process, "good.html", GOOD).text == "Within two weeks.\n"


def test_a_library_without_memory_is_a_reason() -> None:
    refusal = _refusal(ProcessEnded(-signal.SIGABRT), 1)
    assert refusal.reason == "damaged, or needs too much memory to convert"


class PanicException(BaseException):
    """Like the one of Rust libraries, which is not an Exception."""


def test_a_panic_of_a_library_is_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Workbook:
        @staticmethod
        def from_filelike(file: object) -> None:
            raise PanicException("index out of bounds")

    monkeypatch.setattr("python_calamine.CalamineWorkbook", Workbook)
    with pytest.raises(NotConverted, match="damaged"):
        convert_here("a.xls", b"x")


def test_modules_beside_the_documents_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("msgspec", "selectolax", "pypdfium2", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    process = converter_process()
    converted(process, "a.html", GOOD)
    converted(process, "a.pdf", files.pdf(["text"]))
    process.close()
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("suffix", ["docx", "xlsx", "pptx", "epub", "ods"])
def test_archives_that_unpack_to_too_much_are_not_unpacked(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_MOST_UNPACKED", MIB)
    with pytest.raises(NotConverted, match="unpacks to more than 1 MiB"):
        convert_here(f"a.{suffix}", hostile.with_files(hostile.office(suffix), {"more": b"\0" * 2 * MIB}))


def test_archives_within_a_document_are_not_opened(process: LimitedProcess) -> None:
    inner = b"\0" * MIB
    for _ in range(5):
        inner = files.packed({f"{n}.docx": inner for n in range(10)})  # type: ignore[dict-item]
    found = converted(process, "a.docx", hostile.with_files(files.docx(), {"word/embeddings/more.docx": inner}))
    assert found.text == converted(process, "b.docx", files.docx()).text


def test_a_size_that_lies_is_not_believed(process: LimitedProcess) -> None:
    data = hostile.document(hostile.PARAGRAPH * 100_000)
    size = zipfile.ZipFile(io.BytesIO(data)).getinfo("word/document.xml").file_size
    lying = data.replace(size.to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    assert lying != data
    assert refused(process, "a.docx", lying).startswith("not a Word document")


@pytest.mark.parametrize("suffix", ["docx", "xlsx", "pptx", "epub"])
def test_entities_neither_grow_nor_read_files(suffix: str, tmp_path: Path, process: LimitedProcess) -> None:
    secret = files.write(tmp_path / "secret", "the harbor key is 4711")
    for entities in (hostile.LAUGHS, hostile.external(secret.as_uri())):
        text = ""
        with suppress(NotConverted):
            text = converted(process, f"a.{suffix}", hostile.with_entity(suffix, entities)).text
        assert "4711" not in text
        assert len(text) < 1000


def _documents_of_parts() -> dict[str, bytes]:
    """Documents with parts beside their main one."""
    note = '<w:{0} w:id="1">' + word_files.paragraph("note") + "</w:{0}>"
    chart = slides.chart("Sales", {"s": ["1"]}, ["a"])
    diagram = slides.diagram({"1": "Plan"}, [])
    frames = slides.frame('<c:chart r:id="c"/>') + slides.frame('<dgm:relIds r:dm="d"/>')
    return {
        "a.docx": word_files.word(
            word_files.in_list("text", 1),
            styles=word_files.style("S"),
            numbering=word_files.numbering(word_files.list_level(0, "%1.")),
            comments=note.format("comment"),
            footnotes=note.format("footnote"),
            header=word_files.paragraph("header"),
        ),
        "a.pptx": slides.presentation(
            slides.Slide(
                [slides.text("text"), frames],
                {
                    "c": ("chart", chart),
                    "d": ("diagramData", diagram),
                    "n": ("notesSlide", slides.notes("note")),
                    "l": ("slideLayout", slides.slide_xml()),
                },
            )
        ),
        "a.xlsx": growing.FILES["comments of xlsx"](100),
        "b.xlsx": growing.FILES["texts in drawings of xlsx"](100),
        "c.xlsx": growing.FILES["strings of xlsx"](100),
        "a.epub": files.epub(["<p>text</p>"]),
    }


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.xlsx", "b.xlsx", "c.xlsx", "a.epub"])
def test_no_part_has_entities(name: str, tmp_path: Path, process: LimitedProcess) -> None:
    secret = files.write(tmp_path / "secret", "the harbor key is 4711")
    data = _documents_of_parts()[name]
    archive = zipfile.ZipFile(io.BytesIO(data))
    for part in archive.namelist():
        xml = re.sub(r"^\s*<\?xml[^>]*\?>", "", archive.read(part).decode())
        for entities in (hostile.LAUGHS, hostile.external(secret.as_uri())):
            text = ""
            with suppress(NotConverted):
                changed = entities + re.sub("</", "&e;</", xml, count=1)
                text = converted(process, name, hostile.with_files(data, {part: changed})).text
            assert "4711" not in text, part
            assert len(text) < 1000, part


def test_numbers_beyond_all_bounds_lose_no_file() -> None:
    huge = "9" * 4000
    book = workbooks.workbook(
        {"S": '<row r="1"><c r="A1" s="1"><v>9e999999</v></c><c r="B1"><v>7</v></c></row>'},
        {"xl/styles.xml": workbooks.styles("0.0%")},
        more={"styles.xml": "styles"},
    )
    assert _converted("a.xlsx", book) == "# S\n\n9e999999, 7\n\n"
    boxes = slides.text("one", (int(huge), 0, int(huge), 1)), slides.text("two", (0, 0, 1, 1))
    assert _converted("a.pptx", slides.presentation(slides.Slide(boxes))) == "two\n\none\n\n"


def test_a_part_is_told_once_however_often_it_is_named() -> None:
    assert _converted("a.xlsx", growing.FILES["one sheet again and again of xlsx"](1000)).count("# S") == 1
    text = _converted("a.pptx", growing.FILES["one slide again and again of pptx"](4000))
    assert text.count("a") == 4000 // 2 // len(slides.text("a"))
    assert _converted("a.docx", growing.FILES["a chart again and again of docx"](4000)).count("Chart: t") == 1


def test_merged_cells_are_repeated_within_bounds() -> None:
    merged = MergedCells()
    for column in range(1, 2000):
        merged.add(1, column, 1 << 20, column)
    first: tuple[int, dict[int, str]] = (1, dict.fromkeys(range(2000), "a"))
    found = sum(len(cells) for _, cells in merged.spread([first, *((n, {0: "1"}) for n in range(2, 2000))]))
    assert found < 500_000


def _converted(name: str, data: bytes) -> str:
    return convert_here(name, data).text


def test_deep_pages_are_read_or_refused(process: LimitedProcess) -> None:
    for tag in ("<div>", "<span>", "<table><tr><td>", "<ul><li>", "<article>", "<b><p>"):
        assert "deep" in converted(process, "a.html", b"<p>first" + tag.encode() * 4000 + b"deep").text, tag
    assert "Plans" in converted(process, "a.pptx", hostile.deep_slides(5000)).text
    assert refused(process, "a.docx", hostile.document("<w:tbl><w:tr><w:tc>" * 3000 + "</w:tc></w:tr></w:tbl>" * 3000))
    assert refused(process, "a.eml", b"Subject: x\n" + b"Content-Type: message/rfc822\n\n" * 2000)


DEEP = 100_000
BRACKETS = b"[" * DEEP + b"]" * DEEP


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl", b'{"a":' + BRACKETS + b"}", "no text; left out: 1 line is nested too deeply (line 1)"),
        ("a.ipynb", b'{"cells":' + BRACKETS + b"}", "is nested too deeply"),
        ("a.eml", b"Subject: x\n" + b"Content-Type: message/rfc822\n\n" * DEEP, "is nested too deeply"),
    ],
)
def test_any_depth_has_a_reason(name: str, data: bytes, reason: str, process: LimitedProcess) -> None:
    assert refused(process, name, data) == reason


@pytest.mark.parametrize(
    "data", [BRACKETS, b'{"text": "x", "y": ' + BRACKETS + b"}", b'{"a":' * DEEP + b"1" + b"}" * DEEP]
)
def test_deep_json_is_read_as_text(data: bytes, process: LimitedProcess) -> None:
    assert converted(process, "a.json", data).text == data.decode() + "\n"


def test_nested_tables_and_articles_are_told_once(process: LimitedProcess) -> None:
    page = b"<article>one <table><tr><td>two <table><tr><td>three<td>four</table><td>five</table></article>" * 2
    assert (
        converted(process, "a.html", b"<main>" + page).text
        == "one\n\ntwo three four | five\n\none\n\ntwo three four | five\n"
    )


def test_a_chapter_is_told_once_however_often_it_is_named(process: LimitedProcess) -> None:
    assert converted(process, "a.epub", hostile.repeated_chapter(1000)).text == "once\n\n"


@pytest.mark.parametrize("name", hostile.PDFS)
def test_broken_and_locked_pdfs(name: str, process: LimitedProcess) -> None:
    assert refused(process, "a.pdf", hostile.PDFS[name]())


def test_conversion_fetches_nothing(process: LimitedProcess) -> None:
    """Addresses named in documents lead to a server that counts requests."""
    with hostile.counting_server() as (url, requests):
        with pytest.raises(HTTPError):
            urlopen(f"{url}/counted")
        assert requests == ["/counted"]
        for name, data in hostile.naming(url).items():
            with suppress(NotConverted):  # entities are refused
                converted(process, name, data)
        assert requests == ["/counted"]
