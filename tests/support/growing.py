"""Files of any size with many parts of one kind, which take a careless converter the square of the time."""

from __future__ import annotations

import random
from collections.abc import Callable

import files
import hostile
import pdfs
import slides
import word_files as word
import workbooks

Maker = Callable[[int], bytes]
"""Makes a file of about n characters of XML, or of page content."""

_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"


def _repeated(part: str, size: int) -> str:
    return part * max(1, size // len(part))


def _each(part: str, size: int) -> str:
    """Return the part as often as it fits, with its number for {n}."""
    return "".join(part.replace("{n}", str(n)) for n in range(max(1, size // (len(part) + 3))))


def _nested(begin: str, end: str, size: int, inner: str = "") -> str:
    depth = max(1, size // (len(begin) + len(end)))
    return begin * depth + inner + end * depth


# PDF: n characters of content


def _side_by_side(n: int) -> bytes:
    """Tiny texts on one line, each a line of its own to PDFium."""
    count = n // 40
    content = [f"BT /F1 1 Tf 1 0 0 1 {5 + 600 * i / count:.4f} 700 Tm (ab) Tj ET\n" for i in range(count)]
    return pdfs.pages("".join(content))


def _scattered(n: int) -> bytes:
    place = random.Random(1)
    return pdfs.pages(
        "".join(pdfs.text_at(place.randrange(600), place.randrange(780), "ab", "/F1 1 Tf") for _ in range(n // 40))
    )


def _pages(n: int) -> bytes:
    return pdfs.pages(*["BT /F1 9 Tf 9 9 Td (text) Tj ET"] * (n // 200))


def _damaged_pages(n: int) -> bytes:
    """Pages that are named but missing."""
    kids = b"".join(b"%d 0 R " % (9 + i) for i in range(n // 8))
    return pdfs.assembled(
        [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, n // 8)]
    )


_PDFS: dict[str, Maker] = {
    "texts on one line": _side_by_side,
    "a long line": lambda n: pdfs.pages(f"BT /F1 1 Tf 5 700 Td ({'a b' * (n // 3)}) Tj ET"),
    "texts anywhere": _scattered,
    "texts in one place": lambda n: pdfs.pages(_repeated(pdfs.text_at(100, 700, "ab"), n)),
    "comments": lambda n: pdfs.pages(
        "", annotations=[b"<< /Type /Annot /Subtype /Text /Rect [9 9 9 9] /Contents (note) >>"] * (n // 65)
    ),
    "pages": _pages,
    "missing pages": _damaged_pages,
    "saved states": lambda n: pdfs.pages("q " * (n // 4) + "BT /F1 9 Tf 9 9 Td (text) Tj ET " + "Q " * (n // 4)),
    "paths": lambda n: pdfs.pages("0 0 m 9 9 l S " * (n // 14) + "BT /F1 9 Tf 9 9 Td (text) Tj ET"),
}

# Word: n characters of the document, or of another part

_CHART = "http://schemas.openxmlformats.org/drawingml/2006/chart"
_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
_FIELD = '<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText>PAGE</w:instrText></w:r><w:r><w:fldChar w:fldCharType="separate"/></w:r>'
_FIELD_END = '<w:r><w:fldChar w:fldCharType="end"/></w:r>'
_REFERENCE = '<w:r><w:footnoteReference w:id="{n}"/></w:r>'
_NOTE = '<w:footnote w:id="{n}">' + word.paragraph("note") + "</w:footnote>"


def _word(body: str, **parts: str) -> bytes:
    return word.word(word.paragraph("text") + body, **parts)


def _levels(n: int) -> bytes:
    """Paragraphs with a number by their style, in a list of many levels."""
    numbered = '<w:numPr><w:numId w:val="1"/></w:numPr>'
    levels = _each('<w:lvl w:ilvl="{n}"><w:pStyle w:val="x"/><w:lvlText w:val="%1."/></w:lvl>', n // 2)
    return _word(
        _repeated('<w:p><w:pPr><w:pStyle w:val="S"/></w:pPr><w:r><w:t>a</w:t></w:r></w:p>', n // 2),
        styles=word.style("S", numbered),
        numbering=word.numbering(levels),
    )


def _lists(n: int) -> bytes:
    """Lists that share a definition of many levels."""
    levels = _each('<w:lvl w:ilvl="{n}"><w:lvlText w:val="%1."/></w:lvl>', n // 3)
    lists = _each('<w:num w:numId="9{n}"><w:abstractNumId w:val="0"/></w:num>', n // 3)
    item = '<w:p><w:pPr><w:numPr><w:numId w:val="9{n}"/></w:numPr></w:pPr><w:r><w:t>a</w:t></w:r></w:p>'
    return _word(_each(item, n // 3), numbering=word.numbering(levels, lists=lists))


def _one_chart(n: int) -> bytes:
    """A chart that is shown again and again."""
    shown = '<w:p><w:r><w:drawing><c:chart r:id="r1"/></w:drawing></w:r></w:p>'
    relation = (
        f'<Relationships xmlns="{_PACKAGE}"><Relationship Id="r1" Type="x/chart" Target="c.xml"/></Relationships>'
    )
    chart = slides.chart("t", {"s": ["1"] * (n // 150)}, ["a"] * (n // 150))
    return hostile.with_files(
        _word(_repeated(shown, n // 2)), {"word/_rels/document.xml.rels": relation, "word/c.xml": chart}
    )


_WORD: dict[str, Maker] = {
    "paragraphs": lambda n: _word(_repeated(word.paragraph("text"), n)),
    "runs": lambda n: _word(word.paragraph(_repeated(word.run("a"), n))),
    "superscripts": lambda n: _word(word.paragraph(_repeated(word.run("1", '<w:vertAlign w:val="superscript"/>'), n))),
    "large first letters": lambda n: _word(
        _repeated(word.paragraph("a", properties='<w:framePr w:dropCap="drop"/>'), n)
    ),
    "deleted paragraphs": lambda n: _word(_repeated(word.paragraph("", properties="<w:rPr><w:del/></w:rPr>"), n)),
    "references to a note": lambda n: _word(
        word.paragraph(_repeated(_REFERENCE.format(n=1), n)), footnotes=_NOTE.format(n=1)
    ),
    "references to a long note": lambda n: _word(
        word.paragraph(_repeated(_REFERENCE.format(n=1), n // 2)),
        footnotes=f'<w:footnote w:id="1">{word.paragraph("a " * (n // 4))}</w:footnote>',
    ),
    "notes": lambda n: _word(word.paragraph(_each(_REFERENCE, n // 3)), footnotes=_each(_NOTE, n)),
    "notes in notes": lambda n: _word(
        word.paragraph(_REFERENCE.format(n=0)),
        footnotes="".join(
            _NOTE.format(n=i).replace("</w:p>", _REFERENCE.format(n=i + 1) + "</w:p>") for i in range(n // 190)
        ),
    ),
    "comments": lambda n: _word(
        word.paragraph(_each('<w:r><w:commentReference w:id="{n}"/></w:r>', n // 3)),
        comments=_each('<w:comment w:id="{n}" w:author="A">' + word.paragraph("c") + "</w:comment>", n),
    ),
    "fields": lambda n: _word(word.paragraph(_repeated(_FIELD + word.run("1") + _FIELD_END, n))),
    "fields in fields": lambda n: _word(word.paragraph(_nested(_FIELD, _FIELD_END, n, word.run("1")))),
    "fields without an end": lambda n: _word(_repeated(word.paragraph(_FIELD), n)),
    "simple fields": lambda n: _word(word.paragraph(_nested('<w:fldSimple w:instr="PAGE">', "</w:fldSimple>", n))),
    "rows": lambda n: _word(word.table(_repeated(word.row("a", "b"), n))),
    "cells of a row": lambda n: _word(word.table(word.row(*["a"] * (n // 80)), word.row("a"))),
    "wide cells": lambda n: _word(
        word.table(_repeated(word.row(word.cell("a", '<w:gridSpan w:val="1000"/>'), word.cell("b")), n))
    ),
    "rows of shifted columns": lambda n: _word(
        word.table(
            *[
                f'<w:tr><w:trPr><w:gridBefore w:val="{i % 1000}"/></w:trPr>{word.cell("a")}{word.cell("b")}</w:tr>'
                for i in range(n // 240)
            ]
        )
    ),
    "merged rows": lambda n: _word(
        word.table(word.row("a" * 90, "b"), _repeated(word.row(word.cell("<w:p/>", "<w:vMerge/>"), word.cell("b")), n))
    ),
    "tables in tables": lambda n: _word(_nested("<w:tbl><w:tr><w:tc>", "</w:tc></w:tr></w:tbl>", n)),
    "runs in runs": lambda n: _word(f"<w:p>{_nested('<w:r>', '</w:r>', n, '<w:t>a</w:t>')}</w:p>"),
    "text boxes in text boxes": lambda n: _word(
        _nested("<w:p><w:r><w:txbxContent>", "</w:txbxContent></w:r></w:p>", n, word.paragraph("a"))
    ),
    "alternatives in alternatives": lambda n: _word(
        f"<w:p>{_nested('<mc:AlternateContent><mc:Choice>', '</mc:Choice></mc:AlternateContent>', n, '<w:t>a</w:t>')}</w:p>"
    ),
    "bodies in bodies": lambda n: _word(_nested("<w:body>", "</w:body>", n, word.paragraph("a"))),
    "equations in equations": lambda n: _word(
        f"<w:p>{_nested('<m:oMath><m:f><m:num>', '</m:num></m:f></m:oMath>', n, '<m:r><m:t>a</m:t></m:r>')}</w:p>"
    ),
    "styles based on styles": lambda n: _word(
        word.paragraph("a", "0"), styles="".join(word.style(str(i), based_on=str(i + 1)) for i in range(n // 130))
    ),
    "levels of a list": _levels,
    "lists": _lists,
    "a chart again and again": _one_chart,
    "sections with one header": lambda n: _word(_repeated("<w:p/>", n // 2), header=_repeated(word.paragraph("a"), n)),
}

# Presentations: n characters of a slide, or of another part


def _on_slide(*shapes: str) -> bytes:
    return slides.presentation(slides.Slide(["".join(shapes)]))


def _shapes(n: int) -> str:
    place = random.Random(1)
    return "".join(
        slides.text("a", (place.randrange(10**6), place.randrange(10**6), 9**5, 9**5)) for _ in range(n // 260)
    )


def _in_stairs(n: int) -> str:
    return "".join(slides.text("a", (100 * i, 100 * i, 90, 90)) for i in range(n // 260))


def _one_slide(n: int) -> bytes:
    """A slide that is named by many relations."""
    count = n // 150
    related = "".join(f'<Relationship Id="r{i}" Type="x/slide" Target="slides/slide1.xml"/>' for i in range(count))
    listed = "".join(f'<p:sldId id="{i}" r:id="r{i}"/>' for i in range(count))
    return hostile.with_files(
        _on_slide(_repeated(slides.text("a"), n // 2)),
        {
            "ppt/_rels/presentation.xml.rels": f'<Relationships xmlns="{_PACKAGE}">{related}</Relationships>',
            "ppt/presentation.xml": f"<p:presentation {slides.NAMESPACES}><p:sldIdLst>{listed}</p:sldIdLst></p:presentation>",
        },
    )


def _layouts(n: int) -> bytes:
    """Slides with layouts of their own, of one master."""
    count = max(1, n // 2000)
    own = [
        slides.Slide([slides.text("a", kind="body")], {"l": ("slideLayout", slides.slide_xml())}) for _ in range(count)
    ]
    master = slides.slide_xml(
        "".join(slides.text("a", (1, 1, 1, 1), kind="body", index=str(i)) for i in range(n // 300))
    )
    related = f'<Relationships xmlns="{_PACKAGE}"><Relationship Id="r1" Type="x/slideMaster" Target="/ppt/m.xml"/></Relationships>'
    layouts = {f"ppt/slideLayouts/_rels/slideLayout{i}.xml.rels": related for i in range(1, count + 1)}
    return hostile.with_files(slides.presentation(*own), {"ppt/m.xml": master, **layouts})


def _slide_chart(chart: str) -> bytes:
    return slides.presentation(slides.Slide([slides.frame('<c:chart r:id="c"/>')], {"c": ("chart", chart)}))


def _chart(inner: str) -> bytes:
    return _slide_chart(f"<c:chartSpace {slides.NAMESPACES}>{inner}</c:chartSpace>")


def _slide_charts(n: int) -> bytes:
    chart = slides.chart("t", {"s": ["1"] * (n // 150)}, ["a"] * (n // 150))
    shown = slides.frame('<c:chart r:id="c"/>')
    return slides.presentation(slides.Slide([_repeated(shown, n // 2)], {"c": ("chart", chart)}))


_POINTS = '<c:pt idx="{n}"><c:v>1</c:v></c:pt>'
_SLIDES: dict[str, Maker] = {
    "slides": lambda n: slides.presentation(*[slides.Slide([slides.text("a")])] * (n // 700)),
    "shapes": lambda n: _on_slide(_shapes(n)),
    "shapes in stairs": lambda n: _on_slide(_in_stairs(n)),
    "shapes without a place": lambda n: _on_slide(_repeated(slides.text("a"), n)),
    "groups in groups": lambda n: _on_slide(
        _nested("<p:grpSp>" + slides.text("a"), "</p:grpSp>", n, slides.text("deep"))
    ),
    "footers": lambda n: _on_slide(_each(slides.text("f{n}", kind="ftr"), n)),
    "titles": lambda n: _on_slide(_repeated(slides.shape("", kind="title"), n)),
    "paragraphs": lambda n: _on_slide(slides.shape(_repeated("<a:p><a:r><a:t>a</a:t></a:r></a:p>", n))),
    "paragraphs in paragraphs": lambda n: _on_slide(
        slides.shape(_nested("<a:p><a:r>", "</a:r></a:p>", n, "<a:t>a</a:t>"))
    ),
    "equations in paragraphs": lambda n: _on_slide(
        slides.shape(_nested("<a:p><m:oMath>", "</m:oMath></a:p>", n, "<m:t>a</m:t>"))
    ),
    "superscripts": lambda n: _on_slide(
        slides.shape("<a:p>" + _repeated('<a:r><a:rPr baseline="30000"/><a:t>1</a:t></a:r>', n) + "</a:p>")
    ),
    "levels of paragraphs": lambda n: _on_slide(
        slides.shape(_each('<a:p><a:pPr lvl="{n}"><a:buAutoNum/></a:pPr><a:r><a:t>a</a:t></a:r></a:p>', n))
    ),
    "cells": lambda n: _on_slide(slides.table(*[["a", "<", "^"]] * (n // 300))),
    "tables in tables": lambda n: _on_slide(
        slides.frame(_nested("<a:tbl><a:tr><a:tc>", "</a:tc></a:tr></a:tbl>", n, slides.paragraphs("a")))
    ),
    "alternatives in alternatives": lambda n: _on_slide(
        _nested("<mc:AlternateContent><mc:Choice>", "</mc:Choice></mc:AlternateContent>", n, slides.text("a"))
    ),
    "one slide again and again": _one_slide,
    "layouts of one master": _layouts,
    "one chart again and again": _slide_charts,
    "points of a chart": lambda n: _slide_chart(slides.chart("t", {"s": ["1"] * (n // 100)}, ["a"] * (n // 100))),
    "series of a chart": lambda n: _slide_chart(slides.chart("t", {f"s{i}": ["1"] for i in range(n // 400)}, ["a"])),
    "series in series": lambda n: _chart(_nested("<c:ser><c:cat>", "</c:cat></c:ser>", n, _POINTS)),
    "labels in labels": lambda n: _chart(_nested("<c:dLbl>", "</c:dLbl>", n, slides.paragraphs("a"))),
    "levels of a chart": lambda n: _chart(
        f"<c:ser><c:cat><c:lvl>{_each(_POINTS, n // 2)}</c:lvl>{_repeated('<c:lvl/>', n // 2)}</c:cat></c:ser>"
    ),
    "points of a diagram": lambda n: slides.presentation(
        slides.Slide(
            [slides.frame('<dgm:relIds r:dm="d"/>')],
            {
                "d": (
                    "diagramData",
                    slides.diagram(
                        {str(i): "a" for i in range(n // 150)}, [(str(i), str(i + 1)) for i in range(n // 150)]
                    ),
                )
            },
        )
    ),
}

# Workbooks: n characters of a sheet, or of another part

_COMMENTS = f'<comments xmlns="{workbooks.TRANSITIONAL}"><commentList>{{}}</commentList></comments>'
_COMMENT = '<comment ref="A{n}"><text><t>a</t></text></comment>'


def _name(column: int) -> str:
    letters = ""
    while column:
        column, letter = divmod(column - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return letters


def _sheet(rows: str, after: str = "", parts: dict[str, str] | None = None, kind: str = "") -> bytes:
    """A workbook of one sheet, with a part that is related to it."""
    own = {} if parts is None else {"xl/worksheets/_rels/sheet1.xml.rels": workbooks.relations(dict.fromkeys((f"/{name}" for name in parts), kind))}  # fmt: skip
    return workbooks.workbook({"S": f"<sheetData>{rows}</sheetData>{after}"}, {**own, **(parts or {})})


def _merged_columns(n: int) -> bytes:
    """Columns that are merged over all rows."""
    count = n // 120
    first = "".join(f'<c r="{_name(i)}1"><v>1</v></c>' for i in range(1, count + 1))
    rows = "".join(f'<row r="{i}"><c r="A{i}"><v>1</v></c></row>' for i in range(2, count))
    merged = "".join(f'<mergeCell ref="{_name(i)}1:{_name(i)}1048576"/>' for i in range(2, count + 1))
    return _sheet(f'<row r="1">{first}</row>{rows}', f"<mergeCells>{merged}</mergeCells>")


def _one_sheet(n: int) -> bytes:
    """A sheet that is listed again and again."""
    data = _sheet(_each('<row r="{n}"><c r="A{n}"><v>1</v></c></row>', n // 2))
    listed = _each('<sheet name="S{n}" sheetId="{n}" r:id="r1"/>', n // 2)
    book = f'<workbook xmlns="{workbooks.TRANSITIONAL}" xmlns:r="{slides.OFFICE}"><sheets>{listed}</sheets></workbook>'
    return hostile.with_files(data, {"xl/workbook.xml": book})


def _persons(n: int) -> bytes:
    """Sheets of a workbook with many authors of comments."""
    persons = _each('<person id="{n}" displayName="A"/>', n)
    rows = '<row r="1"><c r="A1"><v>1</v></c></row>'
    return workbooks.workbook(
        {f"S{i}": rows for i in range(max(1, n // 1000))},
        {"xl/persons/person.xml": f"<personList>{persons}</personList>"},
        more={"persons/person.xml": "person"},
    )


_SHEETS: dict[str, Maker] = {
    "rows": lambda n: _sheet(_each('<row r="{n}"><c r="A{n}"><v>1</v></c></row>', n)),
    "rows in rows": lambda n: _sheet(_nested('<row r="1"><c r="A1">', "</c></row>", n, "<v>1</v>")),
    "cells of a row": lambda n: _sheet(f'<row r="1">{_repeated("<c><v>1</v></c>", n)}</row>'),
    "merged cells": lambda n: _sheet(
        _each('<row r="{n}"><c r="A{n}"><v>1</v></c><c r="D{n}"><v>2</v></c></row>', n // 2),
        "<mergeCells>" + _each('<mergeCell ref="A{n}:B{n}"/>', n // 2) + "</mergeCells>",
    ),
    "merged cells of one place": lambda n: _sheet(
        _each('<row r="{n}"><c r="A{n}"><v>1</v></c><c r="D{n}"><v>2</v></c></row>', n // 2),
        "<mergeCells>" + _repeated('<mergeCell ref="A1:B1048576"/>', n // 2) + "</mergeCells>",
    ),
    "merged columns": _merged_columns,
    "strings": lambda n: workbooks.workbook(
        {"S": _each('<row r="{n}"><c r="A{n}" t="s"><v>{n}</v></c></row>', n)},
        {"xl/s.xml": f'<sst xmlns="{workbooks.TRANSITIONAL}">{_repeated("<si><t>a</t></si>", n)}</sst>'},
        more={"s.xml": "sharedStrings"},
    ),
    "comments": lambda n: _sheet(
        '<row r="1"><c r="A1"><v>1</v></c></row>', "", {"xl/c.xml": _COMMENTS.format(_each(_COMMENT, n))}, "comments"
    ),
    "comments in comments": lambda n: _sheet(
        '<row r="1"><c r="A1"><v>1</v></c></row>',
        "",
        {"xl/c.xml": _COMMENTS.format(_nested("<comment><text><rPh>", "</rPh></text></comment>", n, "<t>a</t>"))},
        "comments",
    ),
    "texts in drawings": lambda n: _sheet(
        '<row r="1"><c r="A1"><v>1</v></c></row>',
        "",
        {"xl/d.xml": workbooks.DRAWING.format(_repeated(workbooks.SHAPE.format("a"), n))},
        "drawing",
    ),
    "paragraphs in paragraphs of drawings": lambda n: _sheet(
        '<row r="1"><c r="A1"><v>1</v></c></row>',
        "",
        {
            "xl/d.xml": workbooks.DRAWING.format(
                f"<xdr:txBody>{_nested('<a:p><a:r>', '</a:r></a:p>', n, '<a:t>a</a:t>')}</xdr:txBody>"
            )
        },
        "drawing",
    ),
    "one sheet again and again": _one_sheet,
    "authors and sheets": _persons,
    "formats": lambda n: workbooks.workbook(
        {"S": _each('<row r="{n}"><c r="A{n}" s="{n}"><v>1</v></c></row>', n)},
        {"xl/styles.xml": workbooks.styles(*(f"0.0%{i}" for i in range(n // 120)))},
        more={"styles.xml": "styles"},
    ),
}

# Books: n characters of the package document


def _book(manifest: str, spine: str, parts: dict[str, str] | None = None) -> bytes:
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{manifest}</manifest><spine>{spine}</spine></package>'
    )
    return hostile.with_files(files.epub(["<p>a</p>"]), {"OEBPS/book.opf": package, **(parts or {})})


def _package_documents(n: int) -> bytes:
    """A damaged package document that is named again and again."""
    named = _repeated('<rootfile full-path="OEBPS/book.opf"/>', n // 2)
    container = (
        f'<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>{named}</rootfiles></container>'
    )
    return _book(_repeated("<item/>", n // 2), "", {"META-INF/container.xml": container})


_BOOKS: dict[str, Maker] = {
    "items of the spine": lambda n: _book(
        '<item id="c0" href="text/c%200.xhtml"/>' + _each('<item id="i{n}" href="x{n}"/>', n),
        '<itemref idref="c0"/>' + _each('<itemref idref="i{n}"/>', n),
    ),
    "fallbacks": lambda n: _book(
        "".join(f'<item id="i{i}" href="x{i}" media-type="x" fallback="i{i + 1}"/>' for i in range(n // 80)),
        _each('<itemref idref="i{n}"/>', n // 4),
    ),
    "package documents": _package_documents,
    "chapters": lambda n: files.epub(["<p>a</p>"] * (n // 600)),
}

FILES: dict[str, Maker] = {
    f"{kind} of {suffix}": make
    for suffix, kinds in (("pdf", _PDFS), ("docx", _WORD), ("pptx", _SLIDES), ("xlsx", _SHEETS), ("epub", _BOOKS))
    for kind, make in kinds.items()
}
"""Kind, which ends with the suffix of the file -> its maker."""
