"""Old spreadsheets: files that other programs export under the name of an Excel file."""

from __future__ import annotations

import pytest
from binary_workbooks import DATE, floating, text, whole, xlsb
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.plain_text import COMPOUND


def convert(data: bytes, name: str = "export.xls") -> Converted:
    return convert_here(name, data)


def test_pages_and_text_with_the_name_of_a_workbook_are_read() -> None:
    page = b"<html><body><table><tr><th>Article<th>Price<tr><td>Pallet<td>9 EUR</table>"
    assert convert(page).text == "Article | Price\nPallet | 9 EUR\n"
    for encoding in ("utf-8", "utf-16"):
        found = convert("Article\tPrice\nPallet\t9 \u20ac\nCrate\t85 \u20ac\n".encode(encoding))
        assert found.text == "Article, Price\nArticle: Pallet, Price: 9 \u20ac\nArticle: Crate, Price: 85 \u20ac\n"


@pytest.mark.parametrize("data", [b"", b"nothing", b"\t\0\1", b"<?xml version='1.0'?><Workbook/>"])
def test_other_files_are_no_spreadsheets(data: bytes) -> None:
    with pytest.raises(NotConverted, match="damaged"):
        convert(data)


def test_an_old_office_file_read_as_text_is_named() -> None:
    with pytest.raises(NotConverted, match="old Office format: save it as"):
        convert(COMPOUND + b"\0" * 504, "letter.txt")


def test_dates_of_binary_workbooks_are_dates_in_either_kind_of_number() -> None:
    rows = (text("Day"), text("Price")), (whole(46_082, DATE), whole(46_082)), (floating(46_083, DATE), whole(-7))
    book = xlsb(*rows, (whole(46_084, DATE), whole((1 << 28) + 1)))
    assert convert(book, "a.xlsb").text == (
        "# S\n\nDay, Price\nDay: 2026-03-01, Price: 46082\nDay: 2026-03-02, Price: -7\nDay: 2026-03-03, Price: 268435457\n\n"
    )
