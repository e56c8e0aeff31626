"""RTF: paragraphs, tables, notes and characters of any script."""

from __future__ import annotations

import pytest
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.formats import format_of
from cacheblend_documents.word.rtf import from_rtf

FONTS = r"{\fonttbl{\f0\fcharset0 Times;}{\f1\fcharset204 Arial;}{\f2\fcharset2 Symbol;}{\f3\fcharset128 Mincho;}}"


def read(body: str) -> tuple[str, tuple[str, ...]]:
    """Return text and omissions of a document with this body."""
    found = from_rtf((r"{\rtf1\ansi\ansicpg1252\deff0" + FONTS + body + "}").encode("latin-1"))
    return found.text.rstrip("\n"), found.omissions


def test_rtf_is_read_by_its_suffix() -> None:
    assert format_of("letter.RTF") == format_of("letter.rtf")


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.json", "README"])
def test_rtf_with_another_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotConverted, match=r"rename it to \.rtf"):
        convert_here(name, rb"{\rtf1 The deposit is 350 euros.\par}")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (r"The deposit is 350 euros.\par}junk", "The deposit is 350 euros."),
        (r"{\stylesheet{\s1 heading;}}{\info{\author Jon}}\outlinelevel0 Rules\par\pard one\line two\par", "# Rules\n\none\ntwo"),
        (r"\'80 and {\f1 \'cf\'f0\'e8} and {\f3 \'93\'fa\'96\'7b}", "\u20ac and При and 日本"),
        (r"\u8217?s \uc0\u8364 5 \uc1\u55357?\u56832? \u1055\'cf end", "\u2019s €5 😀 П end"),
        (r"10{\super 6} and 4{\super th} and 2\super n\nosupersub .", "10^6 and 4th and 2^n."),
        (r"{\v secret}shown \v hidden\v0 again {\deleted gone}.", "shown again ."),
        (r"{\pntext\f2\'b7\tab}first\par{\listtext 2.\tab}second", "\u2022\tfirst\n\n2.\tsecond"),
        (r'{\field{\*\fldinst HYPERLINK "http://x"}{\fldrslt the link}} \{a\}\~b\_c \emdash', "[the link](http://x) {a} b-c \u2014"),
        (r'{\field{\*\fldinst {HYPERLINK "mailto:a@b.example"}}{\fldrslt {\ul M}ara}}', "[Mara](a@b.example)"),
        (r'{\field{\*\fldinst HYPERLINK \\l "top"}{\fldrslt up}} {\field{\*\fldinst PAGE}{\fldrslt 3}}', "up 3"),
        (r"Fee {\strike 40} \striked1 5\striked0  55, \strike 9\plain  8\strike\par 7", "Fee ~~40~~ ~~5~~ 55, ~~9~~ 8\n\n~~7~~"),
        (r'\trowd\cellx1\intbl {\field{\*\fldinst HYPERLINK "http://x"}{\fldrslt \strike b}}\cell\row', "[~~b~~](http://x)"),
        (r"{\*\unknown hidden}{\pict\pngblip 8950aa}text{\*\generator Riched}", "text"),
        (r"a{\pict\bin5 {{{{{}b", "ab"),
        (r"one\page two\sect three", "one\n\ntwo\n\nthree"),
    ],
)  # fmt: skip
def test_a_body_is_read_as_shown(body: str, text: str) -> None:
    assert read(body) == (text, ())


def test_tables_keep_their_rows_and_merged_cells_their_value() -> None:
    row = r"\trowd{}\cellx100\cellx200\pard\intbl {}\cell {}\cell\row"
    rows = [
        row.format("", "city", r"rate\par per day"),
        row.format(r"\clvmgf", "Bergen", "90"),
        row.format(r"\clvmrg", "", "95"),
    ]
    assert read(r"Rates\par" + "".join(rows) + r"\pard After") == (
        "Rates\n\ncity | rate per day\nBergen | 90\nBergen | 95\n\nAfter", ()
    )  # fmt: skip


def test_notes_comments_and_boxes_follow_their_paragraph_and_a_first_header_is_before_it() -> None:
    body = (
        r"{\header Secret\par}{\headerf Secret\par}{\footer Bergen\par}Text{\footnote A note.}{\*\atnauthor Mara}{\*\annotation Check it.} ends."
        r"{\shp{\*\shpinst{\sp{\sn x}{\sv y}}{\shptxt In a box\par}}{\shprslt copy}}\par Next"
    )
    assert read(body)[0].split("\n\n") == [
        "Header: Secret", "Text ends.", "Footer: Bergen", "Footnote: A note.", "Comment by Mara: Check it.", "In a box", "Next",
    ]  # fmt: skip


def test_things_without_a_text_are_omissions() -> None:
    body = r"{\object{\*\objdata 0102}{\result drawn}}{\f2 abc}{\mmath{\*\moMath x}} \'81"
    text, omissions = read(body)
    assert text.startswith("drawn")
    assert omissions == (
        "1 embedded object", "3 characters of symbol fonts", "1 equation", "1 unreadable character",
    )  # fmt: skip


def test_a_cut_file_is_read_up_to_its_end() -> None:
    found = from_rtf(rb"{\rtf1 The deposit {\b is 350")
    assert (found.text, found.omissions) == ("The deposit is 350\n\n", ("the end of the file is missing",))


def test_a_file_without_rtf_is_refused() -> None:
    with pytest.raises(NotConverted, match="not RTF"):
        from_rtf(b"plain text")
