"""PDF: words, columns, tables, forms, comments, and pages that cannot be read."""

from __future__ import annotations

import base64
import zlib

import files
import pdfs
import pytest
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.pdf.line_order import arranged
from cacheblend_documents.pdf.lines import has_right_to_left, lines_of


def convert(data: bytes) -> Converted:
    return convert_here("a.pdf", data)


def text_of(content: str | bytes, **more: object) -> str:
    return convert(pdfs.pages(content, **more)).text.rstrip("\n")  # type: ignore[arg-type]


def refusal(data: bytes) -> str:
    with pytest.raises(NotConverted) as refused:
        convert(data)
    return refused.value.reason


def test_pages_are_marked_and_the_title_is_kept() -> None:
    found = convert(files.pdf(["On page (one).\nA reim-\nbursement.", "Page two."], "Travel rules"))
    assert found.text == "On page (one).\nA reimbursement.\n\nPage two.\n\n"
    assert found.title == "Travel rules"
    for placeholder in ("untitled", "(anonymous)", "Untitled document", "Microsoft Word - Document1"):
        assert convert(files.pdf(["text"], title=placeholder)).title == ""
    assert [(mark.part, found.text[mark.start :][:4]) for mark in found.marks] == [
        ("page 1", "On p"),
        ("page 2", "Page"),
    ]


def test_a_gap_is_a_blank() -> None:
    """Words without drawn blanks, a tenth of the font size and more apart."""
    assert (
        text_of("BT /F1 12 Tf 72 700 Td [(What) -120 (is) -120 (Earth) -120 (Science)] TJ ET")
        == "What is Earth Science"
    )
    assert text_of("BT /F1 12 Tf 72 700 Td [(Ka) -40 (na) 30 (da)] TJ ET") == "Kanada"


def test_spaced_letters_are_a_word() -> None:
    assert text_of("BT /F1 12 Tf 2 Tc 72 700 Td (ANNUAL REPORT) Tj ET") == "ANNUAL REPORT"


def test_fake_bold_is_read_once() -> None:
    drawn = pdfs.lines_at((72, 700, "Annual Report"), (72.3, 700, "Annual Report"), (72.6, 700, "Annual Report"))
    assert text_of(drawn) == "Annual Report"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("reim-", "bursement"), "reimbursement"),
        (("Jean-", "Luc"), "Jean-\nLuc"),
        (("1990-", "2000"), "1990-\n2000"),
        (("hy\xad", "phens"), "hyphens"),
        (("the self-", "employed"), "the self-employed"),
        (("a Self-", "employed one"), "a Self-employed one"),
        (("fine-tuning and fine-", "tuning of fine-", "ry"), "fine-tuning and fine-tuning of finery"),
        (("email, e-mail, email, e-", "mail"), "email, e-mail, email, email"),
        (("end-of-", "life of end-of-life end-", "of-life"), "end-of-life of end-of-life end-of-life"),
    ],
)
def test_hyphens_at_line_ends(lines: tuple[str, ...], expected: str) -> None:
    assert text_of(pdfs.side_by_side(*((line,) for line in lines))) == expected


def test_a_word_of_another_page_tells_what_its_hyphen_is() -> None:
    cut = pdfs.side_by_side(("a long-",), ("term plan",))
    assert convert(pdfs.pages(cut, pdfs.text_at(72, 700, "Long-term"))).text == "a long-term plan\n\nLong-term\n\n"
    assert convert(pdfs.pages(cut)).text == "a longterm plan\n\n"


@pytest.mark.parametrize(
    ("before", "raised", "after", "expected"),
    [
        ("3.5 \\327 10", "6", " cells", "3.5 \xd7 10^6 cells"),
        ("8 m", "3", "/s", "8 m^3/s"),
        ("The fee is 45", "2", " euros", "The fee is 45^2 euros"),
        ("x", "n+1", ".", "x^(n+1)."),
        ("The 5", "th", " year", "The 5th year"),
        ("", "1", " A footnote", "1 A footnote"),
        ("Chapter ", "and verse", "", "Chapter and verse"),
    ],
)  # fmt: skip
def test_superscripts(before: str, raised: str, after: str, expected: str) -> None:
    line = f"BT /F1 12 Tf 72 700 Td ({before}) Tj /F1 8 Tf 4 Ts ({raised}) Tj /F1 12 Tf 0 Ts ({after}) Tj ET"
    assert text_of(line) == expected


def test_small_letters_on_the_same_baseline_are_no_superscript() -> None:
    assert text_of("BT /F1 14 Tf 72 700 Td (C) Tj /F1 9 Tf (HAPTER) Tj /F1 14 Tf ( 10) Tj ET") == "CHAPTER 10"


PROSE = (
    ("The left column tells", "The right column says"),
    ("that parking costs 45", "that bicycles are free"),
    ("euros a month.", "in hall 2."),
)


def in_columns(rows: tuple[tuple[str, ...], ...]) -> str:
    return "\n".join(row[column] for column in range(len(rows[0])) for row in rows)


def by_row(rows: tuple[tuple[str, ...], ...]) -> str:
    return "\n".join(" ".join(row) for row in rows)


def test_columns_drawn_line_by_line_are_read_one_after_the_other() -> None:
    assert text_of(pdfs.side_by_side(*PROSE)) == in_columns(PROSE)
    three = tuple(
        (*row, third)
        for row, third in zip(PROSE, ("And a third one goes", "on about the trains,", "as it must."), strict=True)
    )
    assert text_of(pdfs.side_by_side(*three, width=170)) == in_columns(three)


def test_a_heading_over_columns_stays_above_them() -> None:
    heading = pdfs.text_at(72, 730, "A heading that is as wide as both of the columns below it together")
    assert text_of(heading + pdfs.side_by_side(*PROSE)).startswith("A heading that")


def test_a_turned_page_has_columns_too() -> None:
    turned = pdfs.side_by_side(*PROSE).replace("1 0 0 1", "0 1 -1 0")
    for n, row in enumerate(PROSE):
        for column, cell in enumerate(row):
            turned = turned.replace(
                f"{72 + 200 * column} {700 - 14 * n} Tm ({cell})", f"{100 + 14 * n} {72 + 200 * column} Tm ({cell})"
            )
    assert text_of(turned, turned=90) == in_columns(PROSE)


@pytest.mark.parametrize(
    "table",
    [
        (("City", "Rate"), ("Bergen", "90"), ("Oslo", "110"), ("Troms\\370", "85")),
        (("Item", "Description of it"), ("Parking", "In the hall, for a month"), ("Bicycles", "Free of charge"), ("Trains", "See the table")),
        (("clean = 1", "clean the content streams"), ("garbage = 1", "collect unused objects"), ("garbage = 2", "and compact the tables")),
        (("Total revenue of the year", "4,500"), ("less the costs of sales", "1,200"), ("gross profit of the year", "3,300")),
    ],
)  # fmt: skip
def test_a_table_is_read_row_by_row(table: tuple[tuple[str, ...], ...]) -> None:
    assert text_of(pdfs.side_by_side(*table)) == by_row(table).replace("\\370", "ø")


BALANCE = (("", "2024", "2023"), ("Cash", "1204", "(998)"), ("Receivables", "(310)", ""), ("Goodwill", "", "(45)"))
WARDS = (("Ward", "Monday", "Tuesday"), ("North", "Per", "Ada"), ("South", "", "Ada"), ("West", "Lena", ""))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (BALANCE, "| 2024 | 2023\nCash | 1204 | (998)\nReceivables | (310) |\nGoodwill |  | (45)"),
        (WARDS, "Ward | Monday | Tuesday\nNorth | Per | Ada\nSouth |  | Ada\nWest | Lena |"),
        (BALANCE[:2], by_row(BALANCE[:2])),
        (tuple(row[:2] for row in BALANCE[1:3]), by_row(tuple(row[:2] for row in BALANCE[1:3]))),
        (tuple(row[::2] for row in BALANCE), "2023\nCash (998)\nReceivables\nGoodwill (45)"),
    ],
)
def test_a_blank_cell_keeps_its_place(table: tuple[tuple[str, ...], ...], expected: str) -> None:
    assert text_of(pdfs.side_by_side(*table)) == expected.strip()


def test_a_heading_over_cells_and_wrapped_cells_are_in_a_table() -> None:
    """A zone may stand between two rows, and columns have headings that are centred."""
    drawn = pdfs.lines_at(
        (72, 730, "A heading that is as wide as the columns of the table below it, and is none of its rows"),
        (90, 700, "Zone"), (272, 700, "Permit"), (400, 700, "Visitor"),
        (72, 686, "North harbour"), (72, 672, "and old town"), (272, 672, "45"),
        (72, 658, "South"), (400, 658, "12"),
        (72, 634, "West"), (272, 643, "38"), (400, 643, "9"), (272, 625, "41"), (400, 625, "10"),
    )  # fmt: skip
    assert text_of(drawn).split("\n")[1:] == [
        "Zone | Permit | Visitor", "North harbour", "and old town | 45 |", "South |  | 12", "West", "| 38 | 9", "| 41 | 10"
    ]  # fmt: skip


def test_pieces_that_are_not_aligned_are_no_table() -> None:
    places = [(72 + 11 * n, 300 + 7 * n, 400 + 13 * n) for n in range(6)]
    drawn = pdfs.lines_at(
        *((x, 700 - 14 * n, "word") for n, xs in enumerate(places) for at, x in enumerate(xs) if (n + at) % 4)
    )
    assert "|" not in text_of(drawn)


def test_rows_of_a_table_with_wrapped_cells_stay_together() -> None:
    """The white space between the rows is wider than the one between the columns."""
    second = (
        ("Then the left cell is", "Then the right cell is"),
        ("about the second row of", "also about the second"),
        ("it and its cells.", "row and its cells."),
    )
    drawn = pdfs.side_by_side(*PROSE, width=145) + pdfs.side_by_side(*second, width=145, top=600)
    assert text_of(drawn) == f"{in_columns(PROSE)}\n{in_columns(second)}"


def test_text_drawn_column_by_column_stays_so() -> None:
    left, right = zip(*PROSE, strict=True)
    drawn = pdfs.lines_at(*((72, 700 - 14 * n, line) for n, line in enumerate(left)))
    drawn += pdfs.lines_at(*((272, 700 - 14 * n, line) for n, line in enumerate(right)))
    assert text_of(drawn) == in_columns(PROSE)


def test_values_of_a_form_go_to_their_labels() -> None:
    labels = pdfs.lines_at(
        (72, 700, "Name:"), (72, 670, "Paid:"), (100, 640, "Newsletter"), (72, 610, "City"), (72, 560, "Notes")
    )
    fields = [
        pdfs.widget("/Tx", "name", "(Lucia Garzas)", (110, 698, 300, 712)),
        pdfs.widget("/Btn", "paid", "/Yes", (110, 668, 122, 680), "/AS /Yes /AP << /N << /Yes null /Off null >> >>"),
        pdfs.widget("/Btn", "letter", "/Off", (80, 638, 92, 650), "/AS /Off /AP << /N << /Yes null /Off null >> >>"),
        pdfs.widget("/Ch", "city", "(Bergen)", (110, 608, 300, 622), "/Ff 131072 /Opt [(Oslo) (Bergen)]"),
        pdfs.widget("/Tx", "notes", "(call first)", (72, 520, 300, 556)),
        pdfs.widget("/Tx", "secret", "(hidden)", (400, 100, 500, 112), "/F 2"),
        pdfs.widget("/Tx", "pin", "(4711)", (400, 130, 500, 142), "/Ff 8192"),
        pdfs.widget("/Tx", "far", "(alone)", (400, 60, 500, 72)),
        pdfs.widget("/Tx", "empty", "()", (400, 160, 500, 172)),
    ]
    found = text_of(labels, annotations=fields)
    assert found == "Name: Lucia Garzas\nPaid: yes\n[ ] Newsletter\nCity Bergen\nNotes call first\nfar: alone"


def test_comments_are_marked_and_typed_text_is_text() -> None:
    notes = [
        b"<< /Type /Annot /Subtype /Text /T (Ada) /Contents (Check this rate.) /Rect [300 700 320 720] >>",
        b"<< /Type /Annot /Subtype /FreeText /Contents (in ink) /DA (/Helv 12 Tf) /Rect [110 698 200 712] >>",
        b"<< /Type /Annot /Subtype /Link /Contents (a link) /Rect [72 700 90 712] >>",
    ]
    assert (
        text_of(pdfs.text_at(72, 700, "Rate:"), annotations=notes) == "Rate: in ink\n\nComment by Ada: Check this rate."
    )


def test_a_damaged_page_is_named_and_the_others_are_read() -> None:
    good = pdfs.pages(pdfs.text_at(72, 700, "one"), pdfs.text_at(72, 700, "two"), pdfs.text_at(72, 700, "three"))
    found = convert(good.replace(b"/Kids [3 0 R 5 0 R 7 0 R]", b"/Kids [3 0 R 99 0 R 7 0 R]"))
    assert found.text == "one\n\nthree\n\n"
    assert found.omissions == ("page 2 cannot be read",)
    assert [mark.part for mark in found.marks] == ["page 1", "page 3"]
    drawing = "0 0 100 100 re f"
    found = convert(pdfs.pages(pdfs.text_at(72, 700, "one"), "", drawing, drawing, "", drawing))
    assert found.omissions == ("pages 3-4, 6: no text; may be scanned (run: ocrmypdf in.pdf out.pdf)",)


def compressed(content: bytes, entries: bytes = b"/Filter /FlateDecode") -> bytes:
    return pdfs.stream(zlib.compress(content), entries)


def test_blank_pages_are_no_omission_but_damaged_content_is() -> None:
    text, colours = pdfs.text_at(72, 700, "one").encode(), b"q 1 0 0 1 72 720 cm 0 G 0 g Q"
    encoded = base64.a85encode(zlib.compress(colours), adobe=True)[2:]
    for content, is_blank in (
        (pdfs.stream(b""), True),
        (pdfs.stream(colours), True),
        (compressed(colours), True),
        (pdfs.stream(encoded, b"/Filter [/ASCII85Decode /FlateDecode]"), True),
        (pdfs.stream(b"damaged" * 9, b"/Filter /FlateDecode"), False),
        (pdfs.stream(encoded[4:], b"/Filter [/ASCII85Decode /FlateDecode]"), False),
        (compressed(text, b"/Filter /LZWDecode"), False),
        (compressed(b" " * 10_000_000), False),
        (compressed(colours)[:-30] + b"\nendstream", False),
    ):
        objects = [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R 4 0 R] /Count 2 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 5 0 R /Resources << /Font << /F1 %s >> >> >>"
            % pdfs.HELVETICA,
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 6 0 R >>",
            pdfs.stream(text),
            content,
        ]
        found = convert(pdfs.assembled(objects))
        expected = () if is_blank else ("page 2: no readable content, may be damaged",)
        assert (found.text, found.omissions) == ("one\n\n", expected), content[:80]
    unsure = convert(pdfs.pages(text, b"").replace(b"xref", b"xxxx"))
    assert unsure.omissions == ("page 2: no readable content, may be damaged",)


def test_an_invalid_operator_costs_nothing() -> None:
    bad = "BT /F1 12 Tf 1 0 0 1 72 700 Tm [(Page 2) 0.0 Tc -250.0 (x)] TJ 13.4 Tm [628 FR 13674] ET"
    found = convert(pdfs.pages(pdfs.text_at(72, 700, "one"), bad))
    assert found.text == "one\n\nPage 2 x\n\n"


def test_a_file_without_its_table_of_objects_is_read() -> None:
    assert convert(files.pdf(["a page"]).replace(b"xref", b"xxxx")).text == "a page\n\n"


def test_documents_without_text_say_how_to_make_them_readable() -> None:
    drawing = "0 0 100 100 re f"
    assert (
        refusal(pdfs.pages(drawing, drawing)) == "a scanned PDF: its 2 pages have no text; run: ocrmypdf in.pdf out.pdf"
    )
    assert refusal(pdfs.pages("")) == "a PDF without text: its page is blank or damaged"
    assert "ocrmypdf --force-ocr in.pdf out.pdf" in refusal(pdfs.pages(GARBAGE, font=pdfs.UNMAPPED))
    assert refusal(b"%PDF-1.7 nothing") == "not a PDF, or damaged beyond reading"


GARBAGE = b"BT /F2 12 Tf 72 700 Td <002400440003004800570003004B00480003> Tj ET"
"""Glyph numbers: the codes of the characters less 29."""


def test_text_of_an_unmapped_font_is_left_out_with_a_word() -> None:
    found = convert(pdfs.pages(pdfs.text_at(72, 730, "Heading").encode() + GARBAGE, font=pdfs.UNMAPPED))
    assert found.text == "Heading\n\n"
    [omission] = found.omissions
    assert omission.startswith("page 1: text in fonts that do not say which characters they show")


def test_few_unknown_characters_do_not_make_a_page_unreadable() -> None:
    lines = b"".join(pdfs.text_at(72, 700 - 20 * n, "Words that everybody reads.").encode() for n in range(10))
    found = convert(pdfs.pages(lines + GARBAGE, font=pdfs.UNMAPPED))
    assert found.text.count("Words that everybody reads.") == 10
    assert found.omissions == ("9 unreadable characters (page 1)",)
    assert found.scanned_pages == ()


def test_codes_that_read_like_words_are_kept() -> None:
    words = b"BT /F2 12 Tf 72 700 Td <%s> Tj ET" % "Property Insurance".encode("utf-16-be").hex().encode()
    found = convert(pdfs.pages(words, font=pdfs.UNMAPPED))
    assert (found.text, found.omissions) == ("Property Insurance\n\n", ())


def test_attached_files_are_an_omission() -> None:
    data = pdfs.pages(pdfs.text_at(72, 700, "one")).replace(
        b"/AcroForm <<", b"/Names << /EmbeddedFiles << /Names [(a) << /Type /Filespec /F (a.txt) >>] >> >> /AcroForm <<"
    )
    assert convert(data).omissions == ("1 attached file",)


def test_a_password_is_a_reason_and_an_empty_one_is_none() -> None:
    assert refusal(pdfs.encrypted("secret", "password")) == "a PDF with a password"
    assert convert(pdfs.encrypted("open to all", "")).text == "open to all\n\n"


HEBREW = ["\u05e9\u05dc\u05d5\u05dd", "\u05e2\u05d5\u05dc\u05dd"]
UNICODE = pdfs.UNMAPPED.replace(b"/Encoding", b"/ToUnicode 3 0 R /Encoding")
"""A font whose codes are characters."""


def shown(font: str, text: str, x: float, y: float) -> bytes:
    return f"BT /{font} 12 Tf 1 0 0 1 {x} {y} Tm <{text.encode('utf-16-be').hex()}> Tj ET\n".encode()


def in_unicode(*contents: bytes) -> str:
    to_unicode = pdfs.stream(
        b"/CIDInit /ProcSet findresource begin begincmap 1 begincodespacerange <0000> <FFFF> endcodespacerange\n"
        b"1 beginbfrange <0000> <FFFF> <0000> endbfrange endcmap end"
    )
    return convert(pdfs.pages(b"".join(contents), font=UNICODE, more=[to_unicode])).text.rstrip("\n")


def test_text_from_right_to_left_is_not_reversed() -> None:
    """Drawn from the left, as all text is: the last character first."""
    drawn = " ".join(HEBREW)[::-1]
    assert in_unicode(shown("F2", drawn, 72, 700)) == " ".join(HEBREW)


JOINED = {"\ufecb": "ع", "\ufed8": "ق", "\ufeaa": "د", "\ufef9": "لإ", "\ufea9": "دَ"}
"""Presentation forms, beside which browsers write their letters."""


def codes_of(text: str) -> dict[str, bytes]:
    return {character: b"%02x" % (33 + n) for n, character in enumerate(sorted(set(text)))}


def converted_with(content: bytes, codes: dict[str, bytes]) -> Converted:
    return convert(pdfs.pages(content, **pdfs.drawn_font({code: character for character, code in codes.items()})))


def printed(*words: str) -> str:
    """Return the text of a line of words, drawn as browsers do: from the left, with spans of letters."""
    line, left = b"", 72.0
    codes = codes_of("".join(words))
    for word in words:
        shown = b"/ReversedChars BMC " * has_right_to_left(word)
        for character in word:
            letters = JOINED.get(character, "").encode("utf-16-be").hex().encode()
            span = b"/Span << /ActualText <feff%s> >> BDC <%s> Tj EMC " if letters else b"%s<%s> Tj "
            shown += span % (letters, codes[character])
        line += b"BT /F2 12 Tf 1 0 0 1 %.2f 700 Tm %s ET\n" % (left, shown + b"EMC" * has_right_to_left(word))
        left += 6 * len(word) + 4
    return converted_with(line, codes).text.rstrip("\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("\ufeaa\ufed8", "15", "\ufeaa\ufed8\ufecb"), "عقد 15 قد"),
        (("ر\ufef9و", "2025", "\ufeaa\ufed8\ufecb"), "عقد 2025 ولإر"),
        (("3.5%", "Pay", "Pal", "םלוע", "4,350", "םולש"), "שלום 4,350 עולם Pay Pal 3.5%"),
        (("ר", "(\ufeaa\ufed8\ufecb)"), "(عقد) ר"),
        (("\ufea9\ufed8\ufecb",), "عقدَ"),
        (("The", "\ufed8\ufecb", "\ufeaa", "title"), "The د عق title"),
    ],
)
def test_lines_from_right_to_left_are_read_by_place(words: tuple[str, ...], expected: str) -> None:
    assert printed(*words) == expected


def test_letters_on_a_slope_are_reported() -> None:
    """Words of Nastaliq go downwards and overlap: where they end is not known."""
    codes = codes_of("ابت")
    places = ((character, 132 - 6 * n, 700 - n % 5) for n, character in enumerate("ابتبتاباتب"))
    drawn = b"".join(b"BT /F2 12 Tf 1 0 0 1 %d %d Tm <%s> Tj ET\n" % (x, y, codes[c]) for c, x, y in places)
    found = converted_with(drawn, codes)
    assert found.text == "ابتبتاباتب\n\n"
    [omission] = found.omissions
    assert omission.startswith("page 1: blanks between words")


def test_vertical_lines_keep_their_order() -> None:
    """The second line stands to the left of the first one."""
    characters = "\u7e26\u66f8\u304d\r\n\u6b21\u306e\u884c"
    boxes = [(x, y, x + 12.0, y + 12.0) for x in (300.0, 260.0) for y in (700.0, 688.0, 676.0, 676.0, 676.0)]
    assert list(arranged(lines_of(characters, boxes[: len(characters)]))) == characters.split("\r\n")
