"""Sheets of workbooks: every filled cell with its column's name, comments and text boxes, and what is left out."""

from __future__ import annotations

import sys

import files
import hostile
import pytest
from cacheblend_documents import conversion
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import Converted, NotConverted
from workbooks import DRAWING, SHAPE, STRICT, TRANSITIONAL, cell, relations, rows, styles, workbook

PRICES = rows(("Item", "Price"), ("Kettle", 19), ("Toaster", 27))
PRICES_TEXT = "# Prices\n\nItem, Price\nItem: Kettle, Price: 19\nItem: Toaster, Price: 27\n\n"


def convert(data: bytes, suffix: str = "xlsx") -> Converted:
    return convert_here(f"a.{suffix}", data)


def lines(data: bytes) -> list[str]:
    """Lines below the heading."""
    return convert(data).text.splitlines()[2:-1]


@pytest.mark.parametrize("namespace", [TRANSITIONAL, STRICT])
@pytest.mark.parametrize("suffix", ["xlsx", "xlsm", "xltx", "xltm"])
def test_both_kinds_of_open_xml_are_read(namespace: str, suffix: str) -> None:
    assert convert(workbook({"Prices": PRICES}, namespace=namespace), suffix).text == PRICES_TEXT


def test_a_wrong_dimension_loses_no_cell() -> None:
    sheet = f'<dimension ref="A1"/><sheetData>{PRICES}</sheetData>'
    assert convert(workbook({"Prices": sheet})).text == PRICES_TEXT


def test_rows_and_cells_without_references_are_counted() -> None:
    sheet = "<row><c><v>1</v></c><c/><c><v>3</v></c></row><row/><row><c><v>4</v></c></row>"
    assert lines(workbook({"S": sheet})) == ["1, 3", "4"]


def test_prefixes_of_names_do_not_matter() -> None:
    sheet = f'<x:worksheet xmlns:x="{TRANSITIONAL}"><x:sheetData><x:row r="1"><x:c r="A1"><x:v>7</x:v></x:c></x:row></x:sheetData></x:worksheet>'  # fmt: skip
    assert lines(workbook({"S": ""}, {"xl/worksheets/sheet1.xml": sheet})) == ["7"]


def test_empty_fills_and_unknown_styles_refuse_no_workbook() -> None:
    book = workbook(
        {"S": rows((cell("A1", 5, style=99), "x"))}, {"xl/styles.xml": styles()}, more={"styles.xml": "styles"}
    )
    assert lines(book) == ["5, x"]


def test_values_are_shown_as_in_a_spreadsheet() -> None:
    codes = "yyyy-mm-dd", "0.0%", "#,##0.00 [$€-407]", "00000", "hh:mm", "dd/mm/yyyy hh:mm:ss"
    values = [
        cell("A1", 46082, style=1), cell("B1", 0.125, style=2), cell("C1", 1200, style=3), cell("D1", 417, style=4),
        cell("E1", 0.395833333333, style=5), cell("F1", 46082.5868055556, style=6),
    ]  # fmt: skip
    others = [
        cell("A2", "0.30000000000000004", kind="n"), cell("B2", "12345678901234567", kind="n"), cell("C2", "3.0", kind="n"),
        cell("D2", 1, kind="b"), cell("E2", "#N/A", kind="e"), "00417", cell("G2", "2026-03-01T00:00:00Z", kind="d"),
    ]  # fmt: skip
    book = workbook({"S": rows(values, others)}, {"xl/styles.xml": styles(*codes)}, more={"styles.xml": "styles"})
    assert lines(book) == [
        "2026-03-01, 12.5%, 1200 €, 00417, 09:30, 2026-03-01 14:05",
        "0.3, 12345678901234567, 3, TRUE, #N/A, 00417, 2026-03-01",
    ]


def test_dates_of_the_calendar_of_1904_are_shown() -> None:
    book = workbook(
        {"S": rows((cell("A1", 44620, style=1),))},
        {"xl/styles.xml": styles("d/m/yy")},
        more={"styles.xml": "styles"},
        properties='<workbookPr date1904="1"/>',
    )
    assert lines(book) == ["2026-03-01"]


def test_shared_strings_are_joined_without_phonetic_guides() -> None:
    strings = (
        f'<sst xmlns="{TRANSITIONAL}"><si><r><t>To</t></r><r><t>kyo</t></r><rPh sb="0" eb="2"><t>TOKYO</t></rPh></si>'
        "<si><t>two_x000D_&#10; lines</t></si></sst>"
    )
    book = workbook(
        {"S": rows((cell("A1", 0, kind="s"), cell("B1", 1, kind="s"), cell("C1", 2, kind="s")))},
        {"xl/sharedStrings.xml": strings},
        more={"sharedStrings.xml": "sharedStrings"},
    )
    assert lines(book) == ["Tokyo, two lines"]
    assert convert(book).omissions == ("1 cell whose text is missing (sheet S)",)


def test_merged_cells_repeat_their_value() -> None:
    data = rows(("Region", "City", "Sales"), ("North", "Bergen", 3), (None, "Tromso", 4), ("South", "Oslo", 5))
    sheet = f'<sheetData>{data}</sheetData><mergeCells><mergeCell ref="A2:A3"/></mergeCells>'
    assert lines(workbook({"S": sheet}))[1:] == [
        "Region: North, City: Bergen, Sales: 3",
        "Region: North, City: Tromso, Sales: 4",
        "Region: South, City: Oslo, Sales: 5",
    ]


def test_merged_titles_stand_alone_and_merged_headers_name_columns() -> None:
    data = rows(
        ("Sales of 2026",), ("Region", "First half", None, "Second half"), (None, "Q1", "Q2", "Q3", "Q4"), ("North", 1, 2, 3, 4),
    )  # fmt: skip
    merges = "".join(f'<mergeCell ref="{ref}"/>' for ref in ("A1:E1", "A2:A3", "B2:C2", "D2:E2"))
    assert lines(workbook({"S": f"<sheetData>{data}</sheetData><mergeCells>{merges}</mergeCells>"})) == [
        "Sales of 2026",
        "Region, First half, Second half",
        "Region, Q1, Q2, Q3, Q4",
        "Region: North, First half Q1: 1, First half Q2: 2, Second half Q3: 3, Second half Q4: 4",
    ]


def test_formulas_without_saved_values_are_counted() -> None:
    formulas = [cell("A1", None, formula="B1*2"), cell("B1", "", kind="n", formula="1+1"), cell("C1", 4, formula="2+2")]
    empty = cell("D1", "", kind="str", formula='""')
    book = workbook({"Prices": PRICES, "Budget": rows((*formulas, empty))})
    found = convert(book)
    assert found.text == PRICES_TEXT + "# Budget\n\n4\n\n"
    assert found.omissions == (
        "2 formulas without saved values (sheet Budget): open the file in a spreadsheet program and save it",
    )
    with pytest.raises(NotConverted, match="1 formula without a saved value"):
        convert(workbook({"Budget": rows((formulas[0],))}))


def test_comments_follow_their_row_and_say_who() -> None:
    comments = (
        f'<comments xmlns="{TRANSITIONAL}"><authors><author>Mara</author><author>tc=1</author></authors><commentList>'
        '<comment ref="B3" authorId="1"><text><t>[Threaded comment] Your version of Excel</t></text></comment>'
        '<comment ref="B2" authorId="0"><text><r><t>Mara:</t></r><r><t>&#10;Only until May</t></r>'
        "<rPh><t>no</t></rPh></text></comment></commentList></comments>"
    )
    threaded = (
        '<ThreadedComments xmlns="urn:t"><threadedComment ref="B3" personId="p"><text>Too dear?</text></threadedComment>'
        '<threadedComment ref="B3" personId="q"><text>No.</text></threadedComment></ThreadedComments>'
    )
    persons = (
        '<personList xmlns="urn:t"><person id="p" displayName="Ada"/><person id="q" displayName="Bo"/></personList>'
    )
    book = workbook(
        {"Prices": PRICES},
        {
            "xl/comments1.xml": comments,
            "xl/threaded.xml": threaded,
            "xl/persons/person.xml": persons,
            "xl/worksheets/_rels/sheet1.xml.rels": relations(
                {"../comments1.xml": "comments", "/xl/threaded.xml": "threadedComment"}
            ),
        },
        more={"persons/person.xml": "person"},
    )
    assert lines(book) == [
        "Item, Price",
        "Item: Kettle, Price: 19",
        "Comment on B2 by Mara: Only until May",
        "Item: Toaster, Price: 27",
        "Comment on B3 by Ada: Too dear?",
        "Comment on B3 by Bo: No.",
    ]


def with_drawing(drawing: str, kinds: dict[str, str]) -> bytes:
    return workbook(
        {"Prices": PRICES},
        {
            "xl/drawings/drawing1.xml": drawing,
            "xl/worksheets/_rels/sheet1.xml.rels": relations({"../drawings/drawing1.xml": "drawing"}),
            "xl/drawings/_rels/drawing1.xml.rels": relations(kinds),
        },
    )


def test_text_boxes_are_kept_and_charts_are_counted() -> None:
    once = f"<mc:AlternateContent><mc:Choice>{SHAPE.format('once')}</mc:Choice><mc:Fallback>{SHAPE.format('once')}</mc:Fallback></mc:AlternateContent>"
    drawing = DRAWING.format(SHAPE.format("Without tax") + once)
    found = convert(with_drawing(drawing, {"../charts/chart1.xml": "chart", "../media/a.png": "image"}))
    assert found.text == PRICES_TEXT + "Without tax\n\nonce\n\n"
    assert found.omissions == ("1 chart (sheet Prices)",)


def test_text_boxes_keep_their_list_numbers() -> None:
    numbered = SHAPE.format("Book early").replace("<a:p>", '<a:p><a:pPr><a:buAutoNum type="arabicPeriod"/></a:pPr>')
    assert "<a:buAutoNum" in numbered
    assert convert(with_drawing(DRAWING.format(numbered), {})).text == PRICES_TEXT + "1. Book early\n\n"


def test_damage_to_a_part_loses_that_part() -> None:
    found = convert(with_drawing("<broken", {}))
    assert found.text == PRICES_TEXT
    assert found.omissions == ("the drawings on sheet Prices cannot be read",)
    cut = f'<worksheet xmlns="{TRANSITIONAL}"><sheetData>{PRICES}<row r="9"><c'
    book = workbook({"Cut": "", "Prices": PRICES}, {"xl/worksheets/sheet1.xml": cut})
    assert convert(book).text == PRICES_TEXT.replace("Prices", "Cut", 1) + PRICES_TEXT
    assert convert(book).omissions == ("sheet Cut cannot be read, or not all of it",)
    styled = workbook({"Prices": PRICES}, {"xl/styles.xml": "<"}, more={"styles.xml": "styles"})
    assert convert(styled).omissions == ("number formats cannot be read: dates are numbers",)


@pytest.mark.parametrize("part", ["xl/workbook.xml", "xl/_rels/workbook.xml.rels"])
def test_sheets_are_found_without_the_list_of_them(part: str) -> None:
    assert convert(workbook({"Prices": PRICES}, {part: "<"})).text == PRICES_TEXT.replace("Prices", "1", 1)


def test_hidden_sheets_are_read_and_empty_ones_have_no_heading() -> None:
    book = workbook({"None": "", "Prices": PRICES.replace("<row ", '<row hidden="1" ')})
    assert convert(book).text == PRICES_TEXT


def test_stray_cells_cost_nothing() -> None:
    far = hostile.sheet(rows(("near",)) + f'<row r="1048576">{cell("XFD1048576", "far")}</row>')
    assert "# People\n\nnear\nfar\n" in convert(far).text
    beyond = hostile.sheet(f'<row r="99999999999">{cell("A99999999999", "beyond")}</row>')
    assert "# People\n\nbeyond\n" in convert(beyond).text


def test_merges_of_everything_repeat_nothing() -> None:
    merges = '<mergeCell ref="A1:XFD1048576"/>' * 1000
    sheet = f"<sheetData>{PRICES}</sheetData><mergeCells>{merges}</mergeCells>"
    assert convert(workbook({"Prices": sheet})).text == PRICES_TEXT


def test_many_cells_with_a_long_string_end_at_the_memory_limit() -> None:
    strings = f'<sst xmlns="{TRANSITIONAL}"><si><t>{"x" * (1 << 20)}</t></si></sst>'
    data = rows(*([(cell("A1", 0, kind="s"),)] * 2000))
    book = workbook({"S": data}, {"xl/sharedStrings.xml": strings}, more={"sharedStrings.xml": "sharedStrings"})
    with pytest.raises(NotConverted, match="memory to convert"):
        conversion.convert("a.xlsx", book)


def test_without_its_library_a_workbook_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("defusedxml", "defusedxml.ElementTree"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotConverted, match="pip install") as refused:
        convert(workbook({"Prices": PRICES}))
    assert refused.value.unread


ODS = (
    '<office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0" xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
    'office:version="1.2"><office:body><office:spreadsheet><table:table table:name="Prices">{}</table:table>'
    '<table:table table:name="Empty"/></office:spreadsheet></office:body></office:document-content>'
)


def ods(*values: tuple[str, ...]) -> bytes:
    """values: XML of the cells of each row, or a text."""
    rows = ""
    for row in values:
        cells = (
            value if value.startswith("<") else f'<table:table-cell office:value-type="string"><text:p>{value}</text:p></table:table-cell>'
            for value in row
        )  # fmt: skip
        rows += f"<table:table-row>{''.join(cells)}</table:table-row>"
    return files.packed(
        {
            "mimetype": "application/vnd.oasis.opendocument.spreadsheet",
            "META-INF/manifest.xml": '<manifest xmlns="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"/>',
            "content.xml": ODS.format(rows),
        }
    )


def test_open_document_sheets_are_read() -> None:
    values = (
        '<table:table-cell office:value-type="date" office:date-value="2026-03-01"/>',
        '<table:table-cell office:value-type="float" office:value="19"/>',
        '<table:table-cell office:value-type="boolean" office:boolean-value="true"/>',
        '<table:table-cell office:value-type="date" office:date-value="2026-03-01T14:05:00"/>',
    )
    book = ods(("Stock 2026",), ("Day", "Price", "Sold", "At"), values, ("00417", "x"))
    assert convert(book, "ods").text == (
        "# Prices\n\nStock 2026\nDay, Price, Sold, At\n"
        "Day: 2026-03-01, Price: 19, Sold: TRUE, At: 2026-03-01 14:05\nDay: 00417, Price: x\n\n"
    )


@pytest.mark.parametrize("suffix", ["xls", "xlsb", "ods"])
def test_broken_sheets_of_other_kinds_are_refused(suffix: str) -> None:
    for data in (b"", b"text", hostile.LAUGHS.encode()):
        with pytest.raises(NotConverted) as refused:
            convert(data, suffix)
        assert refused.value.group == "damaged or locked"


def test_excel_files_named_as_old_ones_are_read() -> None:
    assert convert(workbook({"Prices": PRICES}), "xls").text == PRICES_TEXT
