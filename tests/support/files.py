"""Small files of many kinds, written with the standard library."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from email.message import EmailMessage
from pathlib import Path


def pdf(pages: list[str], title: str = "") -> bytes:
    """Return a PDF with one page per text; "" is a page without text, such as a scan."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    kids = []
    for text in pages:
        lines = "".join(f"({_escaped(line)}) Tj T* " for line in text.split("\n"))
        stream = f"BT /F1 11 Tf 14 TL 50 760 Td {lines}ET" if text else "0.9 g 50 50 500 700 re f"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects)} 0 R "
            f"/Resources << /Font << /F1 {font} >> >> >>"
        )
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    objects.append(f"<< /Title ({_escaped(title)}) >>")
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"trailer << /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")


def docx() -> bytes:
    """A Word document with a heading, a paragraph and a table."""
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"

    def paragraph(text: str, style: str = "") -> str:
        told = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
        return f"<w:p>{told}<w:r><w:t>{text}</w:t></w:r></w:p>"

    def row(*cells: str) -> str:
        return "<w:tr>" + "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in cells) + "</w:tr>"

    body = (
        paragraph("Travel", "Heading1")
        + paragraph("Within two weeks.")
        + f"<w:tbl>{row('city', 'rate')}{row('Bergen', '90')}</w:tbl>"
    )
    style = (
        f'<w:styles xmlns:w="{word}"><w:style w:type="paragraph" w:styleId="Heading1">'
        '<w:name w:val="heading 1"/></w:style></w:styles>'
    )
    package = "http://schemas.openxmlformats.org/package/2006"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    types = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    return packed(
        {
            "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" ContentType="application/vnd.'
            'openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/word/document.xml" ContentType="{types}.document.main+xml"/>'
            f'<Override PartName="/word/styles.xml" ContentType="{types}.styles+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" Type="{office}/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
            "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
            f'Type="{office}/styles" Target="styles.xml"/></Relationships>',
            "word/document.xml": f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>',
            "word/styles.xml": style,
        }
    )


def epub(chapters: list[str]) -> bytes:
    """A book of these chapters of HTML."""
    container = "urn:oasis:names:tc:opendocument:xmlns:container"
    opf = "http://www.idpf.org/2007/opf"
    items = "".join(f'<item id="c{n}" href="text/c%20{n}.xhtml"/>' for n in range(len(chapters)))
    refs = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    files = {f"OEBPS/text/c {n}.xhtml": f"<html><body>{text}</body></html>" for n, text in enumerate(chapters)}
    return packed(
        {
            "META-INF/container.xml": f'<container xmlns="{container}"><rootfiles><rootfile full-path="OEBPS/book.opf"/>'
            "</rootfiles></container>",
            "OEBPS/book.opf": f'<package xmlns="{opf}"><manifest>{items}</manifest><spine>{refs}</spine></package>',
            **files,
        }
    )


def packed(files: Mapping[str, bytes | str]) -> bytes:
    """A ZIP archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def pptx() -> bytes:
    """Two slides: a title with text and notes, and a table."""
    from slides import Slide, notes, paragraphs, presentation, shape, table, text

    plans = [text("Plans", kind="title"), shape(paragraphs("First point", "Second point"), index="1")]
    first = Slide(plans, {"n1": ("notesSlide", notes("Speak slowly."))})
    return presentation(first, Slide([table(["Bergen", "90"])]))


def xlsx() -> bytes:
    """Two sheets, the second with a row."""
    from workbooks import rows, workbook

    people = rows(("name", "city"), ("Mara", "Bergen"), (), ("Ada",))
    return workbook({"People": people, "Budget": rows(("total", 12.5))})


def mail(*, html: bool = False) -> bytes:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "Mara <mara@example.org>", "ada@example.org", "Größe of it"
    message["Date"] = "Mon, 05 Jan 2026 10:00:00 +0000"
    body = "Dear Ada,\n\nwithin two weeks.\n"
    message.set_content(f"<p>{body}</p>" if html else body, subtype="html" if html else "plain")
    message.add_attachment(b"\0\1", maintype="application", subtype="octet-stream", filename="plan.bin")
    return message.as_bytes()


def notebook() -> bytes:
    cells = [
        {"cell_type": "markdown", "source": ["# Study\n", "\n", "Why."], "metadata": {}},
        {"cell_type": "code", "source": "x = 1\n", "outputs": [{"text": "noise"}], "metadata": {}},
    ]
    return json.dumps({"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4}).encode()


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path
