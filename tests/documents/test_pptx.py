"""Presentations: what is read of their slides, in which order, and what is left out with a word."""

from __future__ import annotations

import hostile
import pytest
import slides
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.formats import format_of
from cacheblend_documents.slides.pptx import from_pptx
from slides import Slide, frame, group, paragraphs, presentation, shape, table, text

CHART = frame('<c:chart r:id="x1"/>')
DIAGRAM = frame('<dgm:relIds r:dm="x1"/>')


def text_of(*shapes: str) -> str:
    """Return the text of a slide with these shapes."""
    return from_pptx(presentation(Slide(shapes))).text


def with_part(content: str, kind: str, xml: str) -> tuple[str, tuple[str, ...]]:
    """Return text and omissions of a slide with a part related to it."""
    found = from_pptx(presentation(Slide([text("Sales", kind="title"), content], {"x1": (kind, xml)})))
    return found.text, found.omissions


@pytest.mark.parametrize("suffix", [".pptx", ".pptm", ".potx", ".potm", ".ppsx", ".ppsm"])
def test_every_suffix_of_presentations_is_read(suffix: str) -> None:
    assert format_of(f"a{suffix}") == format_of("a.pptx")


def test_a_chart_is_its_title_and_the_values_of_its_categories() -> None:
    xml = slides.chart("Bicycles sold by depot", {"2026": ["417", "893"]}, ["Bergen", "Oslo"])
    expected = "# Sales\n\nChart: Bicycles sold by depot (2026)\nBergen: 417\nOslo: 893\n\n"
    assert with_part(CHART, "chart", xml) == (expected, ())


def test_series_of_a_chart_are_columns_of_records() -> None:
    xml = slides.chart(
        "Sold", {"2025": ["0.25", "4.2999999999999998"], "2026": ["", "431"]}, ["Bergen", "Oslo"], axis="depot"
    )
    assert with_part(CHART, "chart", xml)[0].endswith(
        "Chart: Sold\ndepot: Bergen, 2025: 0.25\ndepot: Oslo, 2025: 4.3, 2026: 431\n\n"
    )


@pytest.mark.parametrize(
    ("code", "value", "shown"),
    [
        ("0.0%", "0.25", "25%"),
        ("yyyy\\-mm\\-dd", "46023", "2026-01-01"),
        ('[Red]0 "days"', "3", "3 days"),
        ("0", "#N/A", "#N/A"),
    ],
)
def test_values_of_a_chart_have_the_meaning_of_their_format(code: str, value: str, shown: str) -> None:
    xml = slides.chart("", {"": [value]}, ["Bergen"], code=code)
    assert with_part(CHART, "chart", xml)[0].endswith(f"Chart\nBergen: {shown}\n\n")


def test_a_chart_without_saved_values_is_an_omission() -> None:
    assert with_part(CHART, "chart", slides.chart("Sold", {}, [])) == (
        "# Sales\n\nChart: Sold\n\n",
        ("1 chart (slide 1)",),
    )


def test_charts_of_newer_kinds_are_read() -> None:
    xml = (
        f'<cx:chartSpace {slides.NAMESPACES}><cx:chartData><cx:data id="0"><cx:strDim type="cat"><cx:lvl><cx:pt idx="0">Bergen</cx:pt></cx:lvl>'
        '</cx:strDim><cx:numDim type="val"><cx:lvl><cx:pt idx="0">417</cx:pt></cx:lvl></cx:numDim></cx:data></cx:chartData>'
        f"<cx:chart><cx:title><cx:tx><cx:rich>{paragraphs('Sold')}</cx:rich></cx:tx></cx:title></cx:chart></cx:chartSpace>"
    )
    choice = f'<mc:Choice Requires="cx1">{frame("""<cx:chart r:id="x1"/>""")}</mc:Choice><mc:Fallback>{text("use a newer version")}</mc:Fallback>'
    content = f"<mc:AlternateContent>{choice}</mc:AlternateContent>"
    assert with_part(content, "chartEx", xml) == ("# Sales\n\nChart: Sold\nBergen: 417\n\n", ())


def test_a_diagram_is_a_list() -> None:
    texts = {"doc": "", "1": "Order", "2": "Pay", "3": "By card", "4": "Alone"}
    xml = slides.diagram(texts, [("doc", "1"), ("doc", "2"), ("2", "3")])
    assert with_part(DIAGRAM, "diagramData", xml) == ("# Sales\n\n- Order\n- Pay\n- By card\n- Alone\n\n", ())


@pytest.mark.parametrize(
    ("content", "kind", "omission"),
    [
        (CHART, "chart", "1 chart (slide 1)"), (DIAGRAM, "diagramData", "1 diagram (slide 1)"),
        (frame('<p:oleObj r:id="x1"/>'), "oleObject", "1 embedded object (slide 1)"),
    ],
)  # fmt: skip
def test_a_frame_that_cannot_be_read_is_an_omission(content: str, kind: str, omission: str) -> None:
    assert with_part(content, kind, "<broken") == ("# Sales\n\n", (omission,))


def test_an_equation_is_text() -> None:
    equation = "<a:p><a14:m><m:oMath><m:r><m:t>x</m:t></m:r></m:oMath></a14:m></a:p>"
    alternatives = f"<mc:AlternateContent><mc:Choice>{shape(equation)}</mc:Choice><mc:Fallback>{text('picture')}</mc:Fallback></mc:AlternateContent>"
    found = from_pptx(presentation(Slide([text("Proof", kind="title"), alternatives])))
    assert (found.text, found.omissions) == ("# Proof\n\nx\n\n", ())


def test_a_damaged_or_missing_slide_loses_only_that_slide() -> None:
    good = presentation(*(Slide([text(f"Slide {n}")]) for n in (1, 2, 3)))
    broken = hostile.with_files(good, {"ppt/slides/slide2.xml": "<p:sld"})
    found = from_pptx(broken)
    assert found.text == "Slide 1\n\nSlide 3\n\n"
    assert [mark.part for mark in found.marks] == ["slide 1", "slide 3"]
    assert found.omissions == ("slide 2 cannot be read",)
    dangling = good.replace(b"ppt/slides/slide3.xml", b"ppt/slides/slideX.xml")
    assert from_pptx(dangling).omissions == ("slide 3 cannot be read",)


def test_slides_are_read_without_the_list_of_slides() -> None:
    good = presentation(*(Slide([text(f"Slide {n}")]) for n in range(1, 12)))
    found = from_pptx(hostile.with_files(good, {"ppt/presentation.xml": "<p:presentation"}))
    assert found.text.split("\n\n")[:-1] == [f"Slide {n}" for n in range(1, 12)]
    assert found.omissions == ("the order of the slides is unknown",)


def test_a_presentation_without_a_readable_slide_is_refused() -> None:
    broken = hostile.with_files(presentation(Slide([text("a")])), {"ppt/slides/slide1.xml": "<p:sld"})
    with pytest.raises(NotConverted, match="no slide can be read"):
        from_pptx(broken)


def test_strict_open_xml_is_read() -> None:
    xml = slides.chart("Sold", {"": ["417"]}, ["Bergen"])
    data = presentation(Slide([text("Sales", kind="title"), CHART], {"x1": ("chart", xml)}))
    assert from_pptx(slides.strict(data)).text == from_pptx(data).text == "# Sales\n\nChart: Sold\nBergen: 417\n\n"


def test_comments_and_replies_name_their_authors() -> None:
    old = f'<p:cmLst {slides.NAMESPACES}><p:cm authorId="0"><p:text>Too long.</p:text></p:cm></p:cmLst>'
    new = (
        f'<p188:cmLst {slides.NAMESPACES}><p188:cm authorId="B"><p188:replyLst><p188:reply authorId="C"><p188:txBody>{paragraphs("Fixed.")}'
        f"</p188:txBody></p188:reply></p188:replyLst><p188:txBody>{paragraphs('A typo.')}</p188:txBody></p188:cm></p188:cmLst>"
    )
    authors = f'<p:cmAuthorLst {slides.NAMESPACES}><p:cmAuthor id="0" name="Mara"/></p:cmAuthorLst>'
    threaded = f'<p188:authorLst {slides.NAMESPACES}><p188:author id="B" name="Jon"/></p188:authorLst>'
    data = presentation(
        Slide([text("Plans")], {"x1": ("comments", old), "x2": ("comments", new)}),
        parts={"a1": ("commentAuthors", authors), "a2": ("authors", threaded)},
    )
    assert from_pptx(data).text == "Plans\n\nComment by Mara: Too long.\n\nComment by Jon: A typo.\n\nReply: Fixed.\n\n"


def test_merged_cells_repeat_their_value() -> None:
    assert text_of(table(["depot", "<", "year"], ["Bergen", "north", "2025"], ["^", "south", "2026"])) == (
        "depot | depot | year\nBergen | north | 2025\nBergen | south | 2026\n\n"
    )


def test_shapes_are_read_in_columns_and_groups_stay_together() -> None:
    right = [text("right one", (500, 100, 400, 100)), text("right two", (500, 250, 400, 100))]
    left = group(text("left two", (0, 250, 400, 100)), text("left one", (0, 100, 400, 100)), box=(0, 100, 400, 250))
    below = text("below", (0, 500, 900, 100))
    title = text("Two columns", (0, 700, 900, 90), kind="title")
    assert text_of(below, *right, left, title).split("\n\n")[:-1] == [
        "# Two columns", "left one", "left two", "right one", "right two", "below",
    ]  # fmt: skip


def test_rows_are_read_in_rows_if_the_slide_has_them_in_that_order() -> None:
    boxes = [text(f"{row}{column}", (column * 500, row * 200, 400, 100)) for row in (0, 1) for column in (0, 1)]
    assert text_of(*boxes).split() == ["00", "01", "10", "11"]
    assert text_of(*(boxes[n] for n in (0, 2, 1, 3))).split() == ["00", "10", "01", "11"]


def test_a_placeholder_has_the_place_of_its_layout() -> None:
    layout = slides.slide_xml(
        text("", (0, 500, 400, 100), kind="body", index="1"), text("", (0, 0, 400, 100), index="2")
    )
    shapes = [text("below", index="1"), text("above", index="2"), text("between", (0, 250, 400, 100))]
    data = presentation(Slide(shapes, {"x1": ("slideLayout", layout)}))
    assert from_pptx(data).text.split() == ["above", "between", "below"]
    assert text_of(*shapes).split() == ["below", "above", "between"], "the place of some is unknown"


def test_footers_are_read_once_and_slide_numbers_and_dates_of_today_are_not() -> None:
    field = '<a:p><a:fld type="{}"><a:t>9 May</a:t></a:fld></a:p>'
    ends = [
        text("Secret", kind="ftr"),
        shape(field.format("slidenum"), kind="sldNum"),
        shape(field.format("datetime1"), kind="dt"),
    ]
    data = presentation(Slide([text("one"), *ends]), Slide([text("two"), *ends]))
    assert from_pptx(data).text == "one\n\nFooter: Secret\n\ntwo\n\n"


def test_line_breaks_superscripts_and_list_numbers() -> None:
    run = '<a:r><a:rPr baseline="{}"/><a:t>{}</a:t></a:r>'
    broken = f"<a:p>{run.format(0, 'first')}<a:br/>{run.format(0, 'second')}</a:p>"
    powers = f"<a:p>{run.format(0, '10')}{run.format(30000, '-')}{run.format(30000, '6')}{run.format(0, ' of H')}{run.format(-25000, '2')}"
    ordinals = f"{run.format(0, 'O, 4')}{run.format(30000, 'th')}</a:p>"
    numbered = '<a:p><a:pPr{}><a:buAutoNum type="{}"/></a:pPr><a:r><a:t>{}</a:t></a:r></a:p>'
    items = [
        ("", "arabicPeriod", "a"),
        (' lvl="1"', "romanLcParenBoth", "b"),
        (' lvl="1"', "romanLcParenBoth", "c"),
        ("", "arabicPeriod", "d"),
    ]
    body = broken + powers + ordinals + "".join(numbered.format(*item) for item in items)
    assert text_of(shape(body)) == "first\nsecond\n10^-6 of H2O, 4th\n1. a\n(i) b\n(ii) c\n2. d\n\n"


def test_struck_out_text_and_targets_of_links_are_kept() -> None:
    def run(words: str, inner: str = "", strike: str = "noStrike") -> str:
        return f'<a:r><a:rPr strike="{strike}">{inner}</a:rPr><a:t>{words}</a:t></a:r>'

    link = '<a:hlinkClick r:id="l1"/>'
    fee = "<a:p>" + run("Fee ") + run("40 ", strike="sngStrike") + run("9", strike="dblStrike") + run(" 55") + "</a:p>"
    apply = "<a:p>" + run("Apply ", link) + run("here", link) + run("up", '<a:hlinkClick r:id="gone"/>') + "</a:p>"
    button = text("Sick note").replace("<p:nvSpPr>", f"<p:nvSpPr><p:cNvPr>{link}</p:cNvPr>")
    relation = '<Relationship Id="l1" Type="x/hyperlink" Target="https://forms.example/a" TargetMode="External"/>'
    data = hostile.with_files(
        presentation(Slide([shape(fee + apply), button])),
        {"ppt/slides/_rels/slide1.xml.rels": f"<Relationships>{relation}</Relationships>"},
    )
    assert from_pptx(data).text == (
        "Fee ~~40 9~~ 55\n[Apply here](https://forms.example/a)up\n\n[Sick note](https://forms.example/a)\n\n"
    )


def test_a_presentation_with_a_password_says_so() -> None:
    for data in (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "EncryptedPackage".encode("utf-16-le"),
        hostile.FILES["password.docx"](),
    ):
        with pytest.raises(NotConverted) as refused:
            from_pptx(data)
        assert (refused.value.reason, refused.value.group) == ("a presentation with a password", "with a password")


def test_deep_groups_are_read_in_document_order() -> None:
    nested = "deep"
    shapes = text(nested)
    for _ in range(200):
        shapes = group(shapes)
    assert text_of(text("first"), shapes) == "first\n\ndeep\n\n"


def test_repeated_values_do_not_grow_without_bound() -> None:
    words = "word " * 20_000
    merged = text_of(table([words], *(["^"] for _ in range(500))))
    xml = slides.chart("", {words: ["1"] * 500, "b": ["2"] * 500}, ["x"] * 500)
    assert max(len(merged), len(with_part(CHART, "chart", xml)[0])) < 3 * len(words) + 500 * 300
