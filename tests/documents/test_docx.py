"""Word documents: what is kept of them, what is said to be left out, and damaged parts."""

from __future__ import annotations

import io
import zipfile

import pytest
from cacheblend_documents.conversion import convert_here
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.word.docx import from_docx
from cacheblend_documents.word.numbering import formatted
from hostile import with_files
from word_files import cell, in_list, list_level, numbering, paragraph, row, run, style, table, word

RAISED = '<w:vertAlign w:val="superscript"/>'
BEGIN, SEPARATE, END = (f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end"))


def code(text: str) -> str:
    return f"<w:r><w:instrText>{text}</w:instrText></w:r>"


def text_of(body: str, **parts: str) -> str:
    return from_docx(word(body, **parts)).text.removesuffix("\n")


def omissions(body: str, **parts: str) -> tuple[str, ...]:
    return from_docx(word(body, **parts)).omissions


def one(content: str) -> str:
    """Text of a document with one paragraph."""
    return text_of(paragraph(content))


def test_headings_are_found_by_name_and_by_level() -> None:
    styles = (
        style("berschrift2", '<w:outlineLvl w:val="1"/>', called="Überschrift 2")
        + style("Heading1", called="heading 1")
        + style("Mine", based_on="Heading1")
        + style("Title")
        + style("TOCHeading", '<w:outlineLvl w:val="9"/>', based_on="Heading1")
        + style("Heading8", called="heading 8")
    )
    body = "".join(
        paragraph(name, name) for name in ("Title", "Mine", "berschrift2", "Heading8", "TOCHeading", "Other")
    )
    converted = from_docx(word(body, styles=styles))
    assert converted.text == "# Title\n\n# Mine\n\n## berschrift2\n\n###### Heading8\n\nTOCHeading\n\nOther\n"
    assert converted.title == "Title"
    direct = paragraph("A part", properties='<w:outlineLvl w:val="2"/>')
    assert text_of(direct) == "### A part"
    assert text_of(direct.replace("A part", "long " * 100)).startswith("long")


def test_list_numbers_are_counted_by_level() -> None:
    levels = list_level(0, "%1.") + list_level(1, "%1.%2") + list_level(2, "(%3)", "lowerLetter")
    body = "".join(in_list(f"p{n}", 1, level) for n, level in enumerate((0, 1, 1, 2, 2, 0, 1)))
    found = text_of(
        body + paragraph("Between.") + in_list("p7", 1) + in_list("", 1) + in_list("p9", 1), numbering=numbering(levels)
    )
    assert found == ("1. p0\n  1.1 p1\n  1.2 p2\n    (a) p3\n    (b) p4\n2. p5\n  2.1 p6\n\nBetween.\n\n3. p7\n5. p9")


def test_styles_number_their_paragraphs() -> None:
    definition = list_level(0, "%1", more='<w:pStyle w:val="H1"/>') + list_level(
        1, "%1.%2", more='<w:pStyle w:val="H2"/>'
    )
    numbered = '<w:numPr><w:numId w:val="1"/></w:numPr>'
    styles = (
        style("H1", numbered, called="heading 1")
        + style("H2", numbered, called="heading 2")
        + style("Annex", based_on="H1")
        + style("Plain", '<w:numPr><w:numId w:val="0"/></w:numPr>', based_on="H2")
    )
    body = "".join(paragraph(name, name) for name in ("H1", "H2", "H2", "Annex", "H2", "Plain"))
    found = text_of(body, styles=styles, numbering=numbering(definition))
    assert found == "# 1 H1\n\n## 1.1 H2\n\n## 1.2 H2\n\n# 2 Annex\n\n## 2.1 H2\n\n## Plain"


def test_lists_restart_where_they_are_told_to() -> None:
    override = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'
    lists = "".join(
        f'<w:num w:numId="{n}"><w:abstractNumId w:val="0"/>{o}</w:num>' for n, o in ((2, ""), (3, override))
    )
    kept = list_level(0, "%1.") + list_level(1, "%2)", more='<w:lvlRestart w:val="0"/>')
    body = in_list("a", 1) + in_list("b", 2) + in_list("c", 3) + in_list("d", 3) + in_list("e", 1)
    more = in_list("f", 1, 1) + in_list("g", 1) + in_list("h", 1, 1)
    found = text_of(body + more, numbering=numbering(kept, lists=lists))
    assert found == "1. a\n2. b\n7. c\n8. d\n9. e\n  1) f\n10. g\n  2) h"


def test_bullets_legal_numbers_and_linked_numbering_styles_are_read() -> None:
    definition = (
        list_level(0, "%1", "upperRoman")
        + list_level(1, "%1.%2", more="<w:isLgl/>")
        + list_level(2, "\uf0b7", "bullet")
    )
    linked = '<w:numStyleLink w:val="Linked"/>'
    styles = '<w:style w:styleId="Linked"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
    found = text_of(
        in_list("a", 2) + in_list("b", 2, 1) + in_list("c", 2, 2),
        numbering=numbering(definition, linked),
        styles=styles,
    )
    assert found == "I a\n  1.1 b\n    - c"
    box = list_level(0, "\uf0a8", "bullet", '<w:rPr><w:rFonts w:ascii="Wingdings"/></w:rPr>')
    assert text_of(in_list("to do", 1), numbering=numbering(box)) == "- ☐ to do"


@pytest.mark.parametrize(
    ("number", "form", "text"),
    [
        (3, "decimal", "3"), (3, "decimalZero", "03"), (28, "lowerLetter", "bb"), (3, "upperLetter", "C"), (14, "upperRoman", "XIV"),
        (9999, "lowerRoman", "9999"), (12, "ordinal", "12th"), (22, "ordinal", "22nd"), (15, "chineseCounting", "十五"),
        (203, "chineseCountingThousand", "二百〇三"), (2, "decimalEnclosedCircle", "②"), (5, "unknown", "5"), (5, "none", ""),
    ],
)  # fmt: skip
def test_numbers_are_written_in_their_form(number: int, form: str, text: str) -> None:
    assert formatted(number, form) == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('<w:fldSimple w:instr="REF x">' + run("simple") + "</w:fldSimple>", "simple"),
        ('<w:dir w:val="rtl">' + run("right") + '</w:dir><w:bdo w:val="ltr">' + run(" left") + "</w:bdo>", "right left"),
        ("<w:r><w:ruby><w:rt>" + run("とう") + "</w:rt><w:rubyBase>" + run("東") + "</w:rubyBase></w:ruby></w:r>", "東"),
        ('<w:hyperlink r:id="missing">' + run("link") + "</w:hyperlink>", "link"),
        ("<w:smartTag><w:customXml>" + run("tagged") + "</w:customXml></w:smartTag>", "tagged"),
        ("<w:ins>" + run("new") + "</w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del>", "new"),
        ("<w:moveFrom>" + run("here") + "</w:moveFrom><w:moveTo>" + run("there") + "</w:moveTo>", "there"),
        ("<w:r><w:t>KX</w:t><w:noBreakHyphen/><w:t>4471</w:t></w:r>", "KX-4471"),
        ("<w:r><w:t>ta</w:t><w:softHyphen/><w:t>riff\u00ads</w:t></w:r>", "tariffs"),
        ("<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r>", "a b\nc"),
        ("<w:sdt><w:sdtContent>" + run("chosen") + "</w:sdtContent></w:sdt>", "chosen"),
        ('<w:r><w:sym w:font="Wingdings" w:char="F0FE"/><w:sym w:font="Symbol" w:char="F0A3"/></w:r>', "☑≤"),
        (run("\uf067"), "\u03b3"),
        (BEGIN + code("DATE") + SEPARATE + run("12 May") + END, "12 May"),
        (BEGIN + code("IF ") + BEGIN + code("REF x") + SEPARATE + run("no") + END + code("1") + SEPARATE + run("yes") + END, "yes"),
        (run("a") + END + run("b"), "ab"),
        (BEGIN + code("REF") + run("not lost"), "not lost"),
    ],
)  # fmt: skip
def test_a_paragraph_is_read_as_shown(content: str, text: str) -> None:
    assert one(content) == text


@pytest.mark.parametrize(
    ("before", "raised", "text"),
    [
        ("10", "6", "10^6"), ("10", "-6", "10^-6"), ("x", "n+1", "x^(n+1)"), ("m", "2", "m^2"), ("1", "st", "1st"), ("XX", "e", "XXe"),
        ("Name", "*", "Name*"), ("", "1", "1"), ("word ", "a", "word a"), ("see", "[3]", "see[3]"),
    ],
)  # fmt: skip
def test_exponents_are_marked_and_ordinals_are_not(before: str, raised: str, text: str) -> None:
    assert one(run(before) + run(raised[:1], RAISED) + run(raised[1:], RAISED)) == text


def test_styles_can_raise_text_and_subscripts_are_not_marked() -> None:
    assert one(run("H") + run("2", '<w:vertAlign w:val="subscript"/>') + run("O")) == "H2O"
    styles = '<w:style w:styleId="Up"><w:rPr><w:vertAlign w:val="superscript"/></w:rPr></w:style>'
    assert text_of(paragraph(run("10") + run("6", '<w:rStyle w:val="Up"/>') + run(" kg")), styles=styles) == "10^6 kg"


@pytest.mark.parametrize(("value", "mark"), [('w14:val="1"', "☒"), ('w14:val="0"', "☐"), ("", "☒")])
def test_check_boxes_have_their_state(value: str, mark: str) -> None:
    box = f"<w:sdt><w:sdtPr><w14:checkbox><w14:checked {value}/></w14:checkbox></w:sdtPr><w:sdtContent>{run('?')}</w:sdtContent></w:sdt>"
    assert one(box + run(" Vegan")) == f"{mark} Vegan"


def test_form_fields_have_their_values() -> None:
    def field(data: str) -> str:
        return f'<w:r><w:fldChar w:fldCharType="begin"><w:ffData>{data}</w:ffData></w:fldChar></w:r>' + END

    assert one(field('<w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox>')) == "☒"
    assert one(field('<w:checkBox><w:default w:val="1"/></w:checkBox>')) == "☒"
    assert one(field('<w:checkBox><w:default w:val="1"/><w:checked w:val="0"/></w:checkBox>')) == "☐"
    entries = '<w:listEntry w:val="north"/><w:listEntry w:val="south"/>'
    assert one(field(f'<w:ddList><w:result w:val="1"/>{entries}</w:ddList>')) == "south"


def test_hidden_text_is_left_out_and_said() -> None:
    body = paragraph(run("seen ") + run("secret", "<w:vanish/>") + run("too", '<w:vanish w:val="0"/>'))
    assert text_of(body) == "seen too"
    assert omissions(body) == ("hidden text",)
    assert omissions(paragraph(run("a") + run(" ", "<w:vanish/>"))) == ()


def test_headers_and_footers_are_read_once() -> None:
    number = paragraph(run("Page ") + BEGIN + code("PAGE") + SEPARATE + run("3") + END)
    parts = {
        "header": paragraph("Contract KX-4471"), "header2": paragraph("Contract KX-4471"), "header3": number,
        "footer": paragraph("Valid until March") + number,
    }  # fmt: skip
    assert text_of(paragraph("Text."), **parts) == "Header: Contract KX-4471\n\nText.\n\nFooter: Valid until March"


def test_notes_and_comments_follow_their_paragraph() -> None:
    def reference(kind: str, number: int) -> str:
        return f'<w:r><w:{kind}Reference w:id="{number}"/></w:r>'

    body = paragraph(
        run("Rate") + reference("footnote", 5) + run(", fee") + reference("footnote", 2) + reference("footnote", 5)
    )
    body += table(row(cell(paragraph(run("x") + reference("endnote", 1) + reference("comment", 0))), "y"))
    body += paragraph(run("End.") + reference("footnote", 77))
    found = text_of(
        body,
        footnotes=f'<w:footnote w:id="2">{paragraph("yearly")}</w:footnote><w:footnote w:id="5">{paragraph("in 2025")}</w:footnote>',
        endnotes=f'<w:endnote w:id="1">{paragraph("measured")}</w:endnote>',
        comments=f'<w:comment w:id="0" w:author="MK">{paragraph("Weekly from July on")}</w:comment>',
    )
    assert found == (
        "Rate[^1], fee[^2][^1]\n\n[^1]: in 2025\n\n[^2]: yearly\n\nx[^i] | y\n\n[^i]: measured\n\n"
        "Comment by MK: Weekly from July on\n\nEnd."
    )


MERGED, ABOVE = '<w:vMerge w:val="restart"/>', "<w:vMerge/>"


def span(columns: int) -> str:
    return f'<w:gridSpan w:val="{columns}"/>'


def test_merged_cells_repeat_their_text() -> None:
    body = table(
        row(cell("Rota", span(3))),
        row(cell("Room", MERGED), cell("Shift", span(2))),
        row(cell("", ABOVE), "Day", "Nurse"),
        row(cell("Ward 3", MERGED), "Mon", "Ida"),
        row(cell(paragraph(), ABOVE), "Tue", "Per"),
        row("Ward 5", cell("closed", span(2))),
        row(cell("", ABOVE), cell("", ABOVE), cell("", ABOVE)),
    )
    assert text_of(body) == (
        "Rota\nRoom | Shift | Shift\nRoom | Day | Nurse\nWard 3 | Mon | Ida\nWard 3 | Tue | Per\nWard 5 | closed | closed"
    )


def test_forms_and_long_cells_are_not_repeated() -> None:
    form = table(row(cell("Name", span(2)), cell("Mara", span(3))), row(cell("City", span(4)), "Oslo"))
    assert text_of(form) == "Name | Mara\nCity | Oslo"
    long = "word " * 30
    merged = table(row(cell(long, MERGED), "a"), row(cell("", ABOVE), "b"))
    assert text_of(merged).split("\n")[1] == " | b"


def test_cells_in_controls_nested_tables_and_tables_for_layout_are_read() -> None:
    controlled = "<w:sdt><w:sdtContent>{}</w:sdtContent></w:sdt>"
    inner = table(row("a", "b"), row("c", "d"))
    body = f"<w:tbl>{controlled.format('<w:tr>' + cell('one') + controlled.format(cell(inner)) + '</w:tr>')}</w:tbl>"
    assert text_of(body) == "one | a, b; c, d"
    frame = table(row(cell(paragraph("First") + inner)))
    assert text_of(frame) == "First\n\na | b\nc | d"
    columns = cell(paragraph("Skills", "Heading1") + 3 * paragraph("Python")) + cell("Mara")
    assert text_of(table(f"<w:tr>{columns}</w:tr>")) == "# Skills\n\nPython\n\nPython\n\nPython\n\nMara"


def box(text: str) -> str:
    return f"<w:txbxContent>{paragraph(text)}</w:txbxContent>"


def test_text_boxes_are_read_once() -> None:
    shape = (
        f"<w:r><mc:AlternateContent><mc:Choice><wps:txbx>{box('boxed')}</wps:txbx></mc:Choice>"
        f"<mc:Fallback><w:pict><v:textbox>{box('boxed')}</v:textbox></w:pict></mc:Fallback></mc:AlternateContent></w:r>"
    )
    assert one(run("before ") + shape + run("after")) == "before after\n\nboxed"
    fallback = shape.replace(f"<wps:txbx>{box('boxed')}</wps:txbx>", "<wps:ink/>")
    assert one(run("a") + fallback) == "a\n\nboxed"
    assert (
        one(f'<w:r><w:pict><v:textbox>{box("old")}</v:textbox><v:textpath string="DRAFT"/></w:pict></w:r>')
        == "old\n\nDRAFT"
    )


def test_an_initial_is_joined_with_its_paragraph() -> None:
    assert text_of(paragraph("O", properties='<w:framePr w:dropCap="drop"/>') + paragraph("nce upon")) == "Once upon"


def test_pictures_are_their_descriptions() -> None:
    def drawing(description: str) -> str:
        return (
            run("See") + f'<w:r><w:drawing><wp:inline><wp:docPr descr="{description}"/></wp:inline></w:drawing></w:r>'
        )

    assert one(drawing("Two rising curves")) == "See [picture: Two rising curves]"
    assert one(drawing("A map. Description automatically generated with low confidence")) == "See [picture: A map.]"
    assert one(drawing("C:\\my pictures\\a.png")) == one(drawing("Logo")) == "See"


STRIKE = "<w:strike/>"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (run("40 ", STRIKE) + run("euros", "<w:dstrike/>") + run(" 55 euros"), "~~40 euros~~ 55 euros"),
        (run("a", '<w:strike w:val="0"/>') + run("b", '<w:rStyle w:val="Old"/>'), "a~~b~~"),
        (run("c", '<w:rStyle w:val="Old"/><w:strike w:val="0"/>'), "c"),
        (run("10", STRIKE) + run("6", STRIKE + RAISED), "~~10^6~~"),
        (f'<w:hyperlink r:id="l1">{run("here", STRIKE)}</w:hyperlink>', "[~~here~~](https://forms.example/a)"),
    ],
)
def test_struck_out_text_is_marked(content: str, text: str) -> None:
    styles = f'<w:style w:styleId="Old"><w:rPr>{STRIKE}</w:rPr></w:style>'
    assert related(paragraph(content), styles=styles) == text
    by_style = paragraph("Fee 9.", "Old") + paragraph(run("Fee 8.", '<w:strike w:val="0"/>'), "Old")
    assert text_of(by_style, styles=styles) == "~~Fee 9.~~\n\nFee 8."


def related(body: str, more: dict[str, str] | None = None, **parts: str) -> str:
    """Text of a document in which the relations of each part name an address: l1, l2, ..."""
    data = word(body, **parts)
    rels = '<Relationship Id="{}" Type="x/hyperlink" Target="https://forms.example/{}" TargetMode="External"/>'
    own = {
        f"word/_rels/{name}.xml.rels": f"<Relationships>{rels.format('l1', letter)}</Relationships>"
        for name, letter in zip(parts, "bcd", strict=False)
    }
    main = "word/_rels/document.xml.rels"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        of_main = archive.read(main).decode().replace("</Rel", rels.format("l1", "a") + "</Rel")
    return from_docx(with_files(data, {main: of_main, **own, **(more or {})})).text.removesuffix("\n")


def test_targets_of_links_are_kept() -> None:
    link = f'<w:hyperlink r:id="l1">{run("he")}{run("re")}</w:hyperlink>'
    inside = f'<w:hyperlink w:anchor="top">{run("up")}</w:hyperlink>'
    field = BEGIN + code(' HYPERLINK "https://forms.example/sick" ') + SEPARATE + run("Sick note") + END
    simple = f'<w:fldSimple w:instr="HYPERLINK mailto:a@b.example">{run("Mara")}</w:fldSimple>'
    place = BEGIN + code(' HYPERLINK \\l "top" ') + SEPARATE + run("top") + END
    assert related(paragraph(link + inside + place)) == "[here](https://forms.example/a)uptop"
    assert related(paragraph(link.replace("r:id", 'w:anchor="x" r:id'))) == "[here](https://forms.example/a#x)"
    assert text_of(paragraph(field + simple)) == "[Sick note](https://forms.example/sick)[Mara](a@b.example)"
    note = paragraph('<w:r><w:footnoteReference w:id="1"/></w:r>' + link)
    assert related(note, header=paragraph(link), footnotes=f'<w:footnote w:id="1">{paragraph(link)}</w:footnote>') == (
        "Header: [here](https://forms.example/b)\n\n[^1][here](https://forms.example/a)\n\n[^1]: [here](https://forms.example/c)"
    )


def with_chunks(body: str, **chunks: tuple[str, str]) -> bytes:
    """A document with parts in other formats. chunks: identifier -> media type and content."""
    rels = "".join(f'<Relationship Id="{n}" Type="x/aFChunk" Target="{n}.dat"/>' for n in chunks)
    types = "".join(f'<Override PartName="/word/{n}.dat" ContentType="{kind}"/>' for n, (kind, _) in chunks.items())
    return with_files(
        word(body),
        {
            "[Content_Types].xml": f'<Types><Default Extension="dat" ContentType="text/html"/>{types}</Types>',
            "word/_rels/document.xml.rels": f"<Relationships>{rels}</Relationships>",
            **{f"word/{name}.dat": content for name, (_, content) in chunks.items()},
        },
    )


def test_documents_embedded_in_other_formats_stand_in_their_place() -> None:
    page = "<html><body><h1>Warranty</h1><p>It lasts <s>24</s> 27 months.</p></body></html>"
    mht = f"MIME-Version: 1.0\nContent-Type: multipart/related; boundary=b\n\n--b\nContent-Type: text/html\n\n{page}\n--b--\n"
    body = "".join(f'<w:altChunk r:id="{name}"/>' for name in ("html", "mht", "mht", "rtf", "docx", "gone"))
    found = from_docx(
        with_chunks(
            paragraph("Cover sheet.") + body + paragraph("End."),
            html=("", page),
            mht=("message/rfc822", mht.replace("27", "30")),
            rtf=("application/rtf", r"{\rtf1 Signed.\par}"),
            docx=("application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml", "PK"),
        )
    )
    assert found.text == (
        "Cover sheet.\n\n# Warranty\n\nIt lasts ~~24~~ 27 months.\n\n# Warranty\n\nIt lasts ~~24~~ 30 months.\n\nSigned.\n\nEnd.\n"
    )
    assert found.omissions == ("2 embedded documents",)
    alone = from_docx(with_chunks('<w:altChunk r:id="a"/>', a=("text/html", "<p>It lasts 27 months.")))
    assert (alone.text, alone.omissions) == ("It lasts 27 months.\n", ())


def test_charts_and_embedded_files_are_said() -> None:
    body = (
        paragraph("Results", "Heading1")
        + paragraph("<w:r><w:drawing><c:chart r:id='x'/></w:drawing></w:r>") * 2
        + paragraph("<w:r><w:object><o:OLEObject ProgID='Excel.Sheet.12'/></w:object></w:r>")
        + paragraph("<w:r><w:object><o:OLEObject ProgID='Equation.3'/></w:object></w:r>")
        + paragraph("<w:r><w:object><w:control w:name='CheckBox1'/></w:object></w:r>")
        + "<w:altChunk r:id='y'/>"
        + paragraph(BEGIN + code(r"EQ \f(1,2)") + END)
    )
    assert omissions(body) == (
        "2 charts (Results)", "1 embedded object (Results)", "2 equations (Results)", "1 form control (Results)",
        "1 embedded document (Results)"
    )  # fmt: skip
    with pytest.raises(NotConverted, match="no text; left out: 1 chart"):
        convert_here("a.docx", word(paragraph("<w:r><c:chart/></w:r>")))


@pytest.mark.parametrize("suffix", [".docm", ".dotx", ".dotm"])
def test_documents_with_macros_and_templates_are_read(suffix: str) -> None:
    assert convert_here(f"a{suffix}", word(paragraph("text"))).text == "text\n"


def test_strict_documents_and_damaged_packages_are_read() -> None:
    body = paragraph("Deposit", "Heading1") + paragraph("350 euros")
    assert from_docx(word(body, strict=True, comments="")).text == "# Deposit\n\n350 euros\n"
    for changed in ({"_rels/.rels": "<"}, {"word/_rels/document.xml.rels": "<"}):
        assert from_docx(with_files(word(body), changed)).text == "# Deposit\n\n350 euros\n"


@pytest.mark.parametrize(
    ("name", "omission"),
    [
        ("styles", "its styles cannot be read"), ("numbering", "its list numbers cannot be read"),
        ("footnotes", "its footnotes cannot be read"), ("comments", "its comments cannot be read"),
        ("header", "a header cannot be read"),
    ],
)  # fmt: skip
def test_a_damaged_part_is_left_out_and_said(name: str, omission: str) -> None:
    body = paragraph("350 euros") + in_list("text", 1)
    found = from_docx(with_files(word(body, **{name: ""}), {f"word/{name}.xml": "<w:broken"}))
    assert found.text == "350 euros\n\ntext\n"
    assert found.omissions == (omission,)


def test_text_before_a_damaged_place_is_read() -> None:
    whole = word("")
    text = "".join(paragraph(f"line {n}") for n in range(3))
    broken = f'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>{text}<w:p><w:r><w:t>cut</w:t>'
    found = from_docx(with_files(whole, {"word/document.xml": broken}))
    assert found.text == "line 0\n\nline 1\n\nline 2\n\ncut\n"
    assert found.omissions == ("the text after a damaged place cannot be read",)
    with pytest.raises(NotConverted, match="its text cannot be read"):
        from_docx(with_files(whole, {"word/document.xml": "<w:document"}))


def test_a_password_and_the_old_format_are_named() -> None:
    compound = bytes.fromhex("d0cf11e0a1b11ae1") + bytes(100)
    with pytest.raises(NotConverted, match="a Word document with a password"):
        from_docx(compound + "EncryptedPackage".encode("utf-16-le"))
    with pytest.raises(NotConverted, match="old Office format"):
        from_docx(compound)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("<w:sdt><w:sdtContent>", "</w:sdtContent></w:sdt>"), ("<w:p>", "</w:p>"), ("<w:smartTag>", "</w:smartTag>"),
        ("<w:r><w:rPr><w:vertAlign w:val='superscript'/></w:rPr>", "</w:r>"), ("<w:tbl><w:tr><w:tc>", "</w:tc></w:tr></w:tbl>"),
        ("<w:r><w:pict><w:txbxContent><w:p>", "</w:p></w:txbxContent></w:pict></w:r>"),
        ("<mc:AlternateContent><mc:Choice>", "</mc:Choice></mc:AlternateContent>"),
        ("<m:oMath><m:f><m:num>", "</m:num></m:f></m:oMath>"),
    ],
)  # fmt: skip
def test_text_at_any_depth_is_read(start: str, end: str) -> None:
    inner = "<m:r><m:t>deep</m:t></m:r>" if "m:f" in start else run("deep")
    assert "deep" in text_of(start * 3000 + inner + end * 3000)


def test_small_files_do_not_grow_in_tables_lists_and_notes() -> None:
    long = "x" * 10_000
    rows = row(cell(long, MERGED), "a") + row(cell("", ABOVE), "b") * 100
    assert len(text_of(table(rows))) < 11_000
    wide = row(*["a"] * 200) + row("b", cell("c", span(10**9))) * 100
    assert len(text_of(table(wide))) < 2000
    assert len(text_of(in_list("a", 1) * 100, numbering=numbering(list_level(0, long)))) < 7000
    notes = paragraph('<w:r><w:footnoteReference w:id="1"/></w:r>' * 100)
    assert len(text_of(notes, footnotes=f'<w:footnote w:id="1">{paragraph(long)}</w:footnote>')) < 11_000
    circle = style("a", based_on="b") + style("b", based_on="a")
    assert text_of(paragraph("text", "a"), styles=circle) == "text"
