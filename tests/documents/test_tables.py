"""Rows of tables: each with its columns' names, if the table shows them."""

from __future__ import annotations

import csv

import pytest
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.number_formats import cell_text
from cacheblend_documents.sheets.tables import cells_of, numbered_lines


def lines(text: str) -> list[str]:
    """Lines of a table that is written with bars."""
    rows = ((number, cells_of(row.split("|"))) for number, row in enumerate(text.split("\n"), 1))
    return [line for line, _ in numbered_lines(rows, set())]


def convert(text: str, name: str = "a.csv") -> Converted:
    return convert_here(name, text.encode())


def test_title_lines_are_not_a_header() -> None:
    assert lines("Parking permits 2026||\n||\nZone|Price|Office\nA|45|Hall 2\nB|30|Hall 3") == [
        "Parking permits 2026",
        "Zone, Price, Office",
        "Zone: A, Price: 45, Office: Hall 2",
        "Zone: B, Price: 30, Office: Hall 3",
    ]
    assert lines("Report|||\nPeriod:|March||\nZone|Price|Office|Open\nA|45|Hall 2|yes")[:3] == [
        "Report",
        "Period: March",
        "Zone, Price, Office, Open",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "1|2|3\n4|5|6",
        "Mara|45|Bergen\nAda|30|Oslo",
        "Mara|Bergen\nAda|Bergen\nBo|Oslo",
        "2024-01-05|Mara\n2024-01-06|Ada",
        "Name:|Mara\nCity:|Bergen",
        "a sentence\nanother one",
        "alone|5",
        "|10|20\nmedian|5|7\nmode|4|3",
        "Purpose|a sentence that says at some length what the whole sheet is for\nAuthor|Mara",
    ],
)
def test_a_table_that_shows_no_names_has_none(text: str) -> None:
    assert lines(text) == [row.strip("|").replace(":|", ": ").replace("|", ", ") for row in text.split("\n")]


def test_years_and_units_are_names_of_columns() -> None:
    assert lines("Region|2024|2025\nNorth|3|4\nSouth|5|6")[1] == "Region: North, 2024: 3, 2025: 4"
    assert lines("|3.11|3.12\nLinux|yes|yes\nmacOS|no|no")[1] == "Linux, 3.11: yes, 3.12: yes"
    assert lines("|Q1|Q2\nNorth|3|4")[1] == "North, Q1: 3, Q2: 4"


def test_two_header_rows_are_combined() -> None:
    text = "Region|2024|2024|2025|2025\nRegion|H1|H2|H1|H2\nNorth|1|2|3|4"
    assert lines(text)[2] == "Region: North, 2024 H1: 1, 2024 H2: 2, 2025 H1: 3, 2025 H2: 4"


def test_a_second_table_has_its_own_names() -> None:
    assert lines("Part|Qty\nBolt|4\n\nSecond table\nCity|Rain\nBergen|2250\n\n\nA note") == [
        "Part, Qty", "Part: Bolt, Qty: 4", "Second table", "City, Rain", "City: Bergen, Rain: 2250", "A note",
    ]  # fmt: skip


def test_names_hold_across_an_empty_row() -> None:
    assert lines("Part|Qty\n\nBolt|4\nNut|9\n\nNail|")[1:] == ["Part: Bolt, Qty: 4", "Part: Nut, Qty: 9", "Part: Nail"]
    assert lines("name|city\n\nMara|Bergen\nAda|Oslo")[1] == "name: Mara, city: Bergen"


def test_tables_side_by_side_are_apart() -> None:
    text = "Part|Qty||Supplier|Phone\nBolt|4||Acme|555 0147\nNut|9|||"
    assert lines(text)[1:] == ["Part: Bolt, Qty: 4", "Supplier: Acme, Phone: 555 0147", "Part: Nut, Qty: 9"]
    one = "Part|Qty||Supplier|Phone\nBolt|4||Acme|555 0147\nNut|9||Bolts & Co|555 0148"
    assert lines(one)[1] == "Part: Bolt, Qty: 4, Supplier: Acme, Phone: 555 0147"

    same = "City|Rain||City|Rain\nBergen|2250||Oslo|760"
    assert lines(same)[1:] == ["City: Bergen, Rain: 2250", "City: Oslo, Rain: 760"]


def test_titles_of_parts_of_a_sheet_are_not_names() -> None:
    text = "Income|||Spent||\nItem|Amount||62%|2336|1414\nPay|2500||62%|2336|1414\nRent|800||62%|2336|1414"
    assert lines(text) == ["Income, Spent", "Item, Amount, 62%, 2336, 1414", "Pay, 2500, 62%, 2336, 1414", "Rent, 800, 62%, 2336, 1414"]  # fmt: skip


def test_notes_within_a_table_have_no_name() -> None:
    text = "Zone|Price|Office\nA|45|Hall 2\nNorth region||\nB|30|Hall 3\nZone|Price|Office\nD|9|Hall 4\nSource: us||"
    assert lines(text)[2:] == [
        "North region",
        "Zone: B, Price: 30, Office: Hall 3",
        "Zone, Price, Office",
        "Zone: D, Price: 9, Office: Hall 4",
        "Source: us",
    ]
    assert lines("Zone|Price|Office\nA||\nB||\nC|30|")[1:3] == ["Zone: A", "Zone: B"]
    assert "Zone: Hall" in convert("Zone,Price,Office\nA,45,x\nHall,,\nB,30,y\n").text


def test_long_names_are_shortened_in_the_rows() -> None:
    found = lines("n" * 1000 + "|m\n" + "x|1\n" * 3)
    assert len(found[0]) == 1003
    assert all(len(line) < 300 for line in found[1:])


@pytest.mark.parametrize(
    "text",
    [
        "sep=;\nName;City\nMara;Bergen\n",
        '"sep=;"\r\nName;City\r\nMara;Bergen\r\n',
        "Name;City\nMara;Bergen\n",
        "Name|City\nMara|Bergen\n",
        "Name\tCity\nMara\tBergen\n",
        "sep=\t\nName\tCity\nMara\tBergen\n",
    ],
)
def test_the_delimiter_is_detected(text: str) -> None:
    found = convert(text)
    assert found.text == "Name, City\nName: Mara, City: Bergen\n"
    assert found.marks[-1].line == text.count("\n")


def test_the_delimiter_is_the_one_with_even_rows() -> None:
    assert convert("a;b\n1,5;2,3\n2,5;3\n").text == "a, b\na: 1,5, b: 2,3\na: 2,5, b: 3\n"
    assert convert("name;note\nx;hello, there\ny;a, b, c\n").text.endswith("name: y, note: a, b, c\n")
    assert convert("Title; of it,,\nZone,Price,Office\nA,45,Hall 2\n").text.endswith("Zone: A, Price: 45, Office: Hall 2\n")  # fmt: skip


def test_a_column_of_a_file_has_its_name() -> None:
    assert convert("name\nMara\nAda\n").text == "name\nname: Mara\nname: Ada\n"


def test_rows_before_a_broken_one_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_documents.sheets.delimited._LONGEST_CELL", 70_000)
    found = convert(f"name,city\nMara,Bergen\nAda,{'x' * 80_000}\nBo,Oslo\n")
    csv.field_size_limit(1 << 17)
    assert found.text == "name, city\nname: Mara, city: Bergen\n"
    assert found.omissions == ("the rows from line 3 cannot be read: field larger than field limit (70000)",)
    with pytest.raises(NotConverted, match="not a table"):
        convert("x" * 80_000)


@pytest.mark.parametrize(
    ("value", "code", "text"),
    [
        ("0.30000000000000004", "", "0.3"), ("19.0", "General", "19"), ("12345678901234567", "0", "12345678901234567"),
        ("1E-7", "", "1e-07"), ("1.5E+300", "", "1.5e+300"), ("n/a", "0", "n/a"), ("-3", "0.00", "-3"),
        ("0.125", "0%", "12.5%"), ("-0.05", "0.0%", "-5%"),
        ("1200", '"$"#,##0.00_);\\("$"#,##0.00\\)', "$1200"), ("-2.5", "[$€-2] #,##0.00", "-€ 2.5"), ("7", '0" kg"', "7 kg"),
        ("5000000", '0.0,,"M"', "5M"), ("417", "00000", "00417"), ("0.5", "# ?/?", "0.5"), ("7", ";;;", "7"), ("7", "@", "7"),
        ("46082", "d. mmmm yyyy", "2026-03-01"), ("46082.5", "mmm yy", "2026-03-01 12:00"), ("0.75", "h:mm AM/PM", "18:00"),
        ("1.25", "[h]:mm", "30:00"), ("46082.000011574", "yyyy-mm-dd hh:mm:ss", "2026-03-01 00:00:01"),
        ("1", "yyyy-mm-dd", "1900-01-01"), ("-1", "yyyy-mm-dd", "-1"), ("1e10", "yyyy-mm-dd", "10000000000"),
        ("5", '"day "0', "day 5"), ("5", '"' * 1000, "5"), ("5", "[" * 1000, "5"),
    ],
)  # fmt: skip
def test_numbers_are_shown_in_their_format(value: str, code: str, text: str) -> None:
    assert cell_text(value, code) == text
