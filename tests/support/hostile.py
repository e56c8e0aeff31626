"""Hostile files: archives that unpack to gigabytes, entities, nesting, broken PDFs, and documents that name
addresses."""

from __future__ import annotations

import copy
import http.server
import io
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import files
import pdfs
from slides import Slide, presentation, slide_xml, text

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_FAR_CELL = '<row r="{row}"><c r="{column}{row}" t="inlineStr"><is><t>a</t></is></c></row>'
PARAGRAPH = "<w:p><w:r><w:t>a</w:t></w:r></w:p>"


def _ten(number: int) -> str:
    return f"&e{number};" * 10


LAUGHS = (
    '<!DOCTYPE x [<!ENTITY e0 "haha">'
    + "".join(f'<!ENTITY e{n} "{_ten(n - 1)}">' for n in range(1, 12))
    + '<!ENTITY e "&e11;">]>'
)
"""Entities that grow to 400 GB; `&e;` is the largest."""


def external(url: str) -> str:
    return f'<!DOCTYPE x [<!ENTITY e SYSTEM "{url}">]>'


def with_files(archive: bytes, changed: Mapping[str, bytes | str]) -> bytes:
    """The archive with these files replaced or added."""
    source, out = zipfile.ZipFile(io.BytesIO(archive)), io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for name in dict.fromkeys((*source.namelist(), *changed)):
            target.writestr(name, changed[name] if name in changed else source.read(name))
    return out.getvalue()


def office(suffix: str) -> bytes:
    makers: dict[str, Callable[[], bytes]] = {
        "docx": files.docx, "xlsx": files.xlsx, "pptx": files.pptx, "epub": lambda: files.epub(["<p>a</p>"]),
        "ods": lambda: files.packed({}),
    }  # fmt: skip
    return makers[suffix]()


def document(body: str, before: str = "") -> bytes:
    """A Word document with this body."""
    xml = f'{before}<w:document xmlns:w="{_WORD}"><w:body>{body}</w:body></w:document>'
    return with_files(files.docx(), {"word/document.xml": xml})


def sheet(rows: str, before: str = "") -> bytes:
    """A workbook whose first sheet has these rows."""
    xml = f'{before}<worksheet xmlns="{_SHEET}"><sheetData>{rows}</sheetData></worksheet>'
    return with_files(files.xlsx(), {"xl/worksheets/sheet1.xml": xml})


def _slide() -> str:
    return zipfile.ZipFile(io.BytesIO(files.pptx())).read("ppt/slides/slide1.xml").decode()


def deep_slides(depth: int) -> bytes:
    group = '<p:grpSp><p:nvGrpSpPr><p:cNvPr id="9" name="g"/><p:cNvGrpSpPr/><p:nvPr/></p:nvGrpSpPr><p:grpSpPr/>'  # fmt: skip
    nested = group * depth + "</p:grpSp>" * depth + "</p:spTree>"
    return with_files(files.pptx(), {"ppt/slides/slide1.xml": _slide().replace("</p:spTree>", nested)})


def with_entity(suffix: str, entities: str) -> bytes:
    """A document with this document type and `&e;` in its text."""
    if suffix == "docx":
        return document("<w:p><w:r><w:t>text &e;</w:t></w:r></w:p>", entities)
    if suffix == "xlsx":
        return sheet('<row r="1"><c r="A1" t="inlineStr"><is><t>text &e;</t></is></c></row>', entities)
    if suffix == "pptx":
        slide = _slide().replace("?>", f"?>{entities}", 1).replace("Plans", "text &e;")
        return with_files(files.pptx(), {"ppt/slides/slide1.xml": slide})
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile full-path="OEBPS/book.opf"/>'
        "&e;</rootfiles></container>"
    )
    return with_files(office("epub"), {"META-INF/container.xml": entities + container})


def repeated_chapter(times: int) -> bytes:
    refs = '<itemref idref="c0"/>' * times
    opf = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="c0" href="text/c%200.xhtml"/></manifest>'
        f"<spine>{refs}</spine></package>"
    )
    return with_files(files.epub(["<p>once</p>"]), {"OEBPS/book.opf": opf})


def _pdf(*objects: bytes) -> bytes:
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


_CATALOG = b"<< /Type /Catalog /Pages 2 0 R >>"


def pdf_page(content: bytes, filters: bytes = b"") -> bytes:
    """A PDF of one page with this content stream."""
    return _pdf(
        _CATALOG,
        b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
        b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), filters, content),
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 3 0 R >>",
    )


def _zeros(size: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(size >> 20)) + packer.flush()


def _page_tree(levels: int) -> bytes:
    """10 ** levels pages in as many lines."""
    inner = [b"<< /Type /Pages /Kids [%s] /Count 1 >>" % (b"%d 0 R " % (n + 3) * 10) for n in range(levels)]
    return _pdf(_CATALOG, *inner, b"<< /Type /Page /MediaBox [0 0 612 792] >>")


PDFS: dict[str, Callable[[], bytes]] = {
    "locked": lambda: pdfs.encrypted("secret", "password"),
    "cut off": lambda: files.pdf(["a page of text"] * 50)[:3000],
    "pages of themselves": lambda: _pdf(_CATALOG, b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 99 >>"),
    "a billion pages": lambda: _page_tree(9),
    "256 MB of blanks": lambda: pdf_page(_zeros(256 << 20), b"/Filter /FlateDecode"),
    "256 MB of blanks, packed twice": lambda: pdf_page(
        zlib.compress(_zeros(256 << 20)), b"/Filter [/FlateDecode /FlateDecode]"
    ),
    "deep arrays": lambda: _pdf(
        _CATALOG[:-2] + b"/X " + b"[" * 100_000 + b"]" * 100_000 + b">>", b"<< /Type /Pages /Kids [] /Count 0 >>"
    ),
}


def naming(url: str) -> dict[str, bytes]:
    """Documents of each kind that name this address wherever their format has a place for one."""
    page = (
        f'<html><head><base href="{url}"><link rel=stylesheet href="{url}/css"><script src="{url}/js"></script>'
        f'<meta http-equiv=refresh content="0; url={url}/refresh"></head><body background="{url}/b"><img src="{url}/img">'
        f'<iframe src="{url}/frame"></iframe><object data="{url}/o"></object><svg><image href="{url}/svg"/></svg>'
        f'<p style="background: url({url}/style)">text</p></body></html>'
    ).encode()
    relations = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="r1" Type="{_RELATIONS}/image" Target="{url}/image" TargetMode="External"/>'
        f'<Relationship Id="r2" Type="{_RELATIONS}/attachedTemplate" Target="{url}/template" TargetMode="External"/></Relationships>'
    )
    picture = (
        '<w:p><w:r><w:t>text</w:t></w:r><w:r><w:drawing xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing" '
        'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture" '
        f'xmlns:r="{_RELATIONS}"><wp:inline><a:graphic><a:graphicData><pic:pic><pic:blipFill><a:blip r:link="r1"/></pic:blipFill></pic:pic>'
        "</a:graphicData></a:graphic></wp:inline></w:drawing></w:r></w:p>"
    )
    action = (
        f"/OpenAction << /S /URI /URI ({url}/action) >> /AA << /O << /S /SubmitForm /F ({url}/form) >> >> >>".encode()
    )
    mail = (
        f"Subject: x\nMIME-Version: 1.0\nContent-Type: message/external-body; access-type=URL; URL=\"{url}/mail\"\n\n"
        f"Content-Type: text/plain\n\ntext\n"
    ).encode()  # fmt: skip
    dtd = f'<!DOCTYPE x SYSTEM "{url}/dtd">'
    return {
        "a.html": page,
        "a.xhtml": f'<?xml version="1.0"?><?xml-stylesheet href="{url}/xsl"?>{dtd}'.encode() + page,
        "a.eml": mail,
        "a.epub": files.epub([page.decode()]),
        "a.docx": with_files(
            document(picture), {"word/_rels/document.xml.rels": relations, "word/_rels/settings.xml.rels": relations}
        ),
        "a.pdf": files.pdf(["text"]).replace(_CATALOG, _CATALOG[:-2] + action),
        "a.csv": f'name,formula\na,"=WEBSERVICE(""{url}/csv"")"\n'.encode(),
        "a.ipynb": files.notebook().replace(b"Why.", f"![x]({url}/notebook)".encode()),
        "a.json": f'[{{"$ref": "{url}/ref", "text": "{url}/text"}}]'.encode(),
        **{f"entity.{suffix}": with_entity(suffix, external(f"{url}/entity")) for suffix in ("docx", "xlsx", "pptx")},
        **{f"dtd.{suffix}": with_entity(suffix, dtd).replace(b"&e;", b"") for suffix in ("docx", "xlsx", "pptx")},
    }


@contextmanager
def counting_server() -> Iterator[tuple[str, list[str]]]:
    """Address of a server on this machine, and the paths it was asked for."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(404)

        do_POST = do_HEAD = do_PUT = do_OPTIONS = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()


def _overlapping() -> bytes:
    """A Word document with 2,000 more entries that all have the same megabyte of data."""
    out = io.BytesIO(files.docx())
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as target:
        target.writestr("word/media/0", b"\0" * (1 << 20))
        one = target.infolist()[-1]
        for number in range(1, 2000):
            copied = copy.copy(one)
            copied.filename = copied.orig_filename = f"word/media/{number}"
            target.filelist.append(copied)
            target.NameToInfo[copied.filename] = copied
    return out.getvalue()


def _nested(levels: int) -> bytes:
    """An archive of archives, 10 ** levels MB unpacked, without a document."""
    inner = b"\0" * (1 << 20)
    for _ in range(levels):
        inner = files.packed({f"{n}.zip": inner for n in range(10)})  # type: ignore[dict-item]
    return inner


def _with_a_password() -> bytes:
    """A Word document whose entries are marked as encrypted."""
    data = bytearray(files.docx())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(signature)
        while place >= 0:
            data[place + flags] |= 1
            place = data.find(signature, place + 1)
    return bytes(data)


_MAIL = b"Subject: x\n"

FILES: dict[str, Callable[[], bytes]] = {
    "div.html": lambda: b"<div>" * 100_000,
    "tables.html": lambda: b"<table><tr><td>" * 100_000,
    "lists.html": lambda: b"<ul><li>" * 100_000,
    "menus.html": lambda: b"<nav>" * 200_000,
    "attributes.html": lambda: b"<p " + b" ".join(b"a%d=1" % n for n in range(200_000)) + b">",
    "addresses.eml": lambda: _MAIL + b"To: " + b"a@b," * 100_000 + b"\n\nx",
    "quotes.eml": lambda: _MAIL + b"From: " + b'"' * 100_000 + b"\n\nx",
    "parameters.eml": lambda: _MAIL + b"Content-Type: text/plain; " + b"a*0=x; " * 50_000 + b"\n\nx",
    "parts.eml": lambda: _MAIL + b"Content-Type: multipart/mixed; boundary=b\n\n" + b"--b\n\nx\n" * 500_000,
    "nested.eml": lambda: _MAIL + b"Content-Type: message/rfc822\n\n" * 20_000,
    "names.csv": lambda: (
        b",".join(b"n" * 200 + b"%d" % n for n in range(1000)) + b"\n" + (b"1," * 1000 + b"\n") * 20_000
    ),
    "columns.csv": lambda: b",".join(b"a%d" % n for n in range(100_000)) + b"\n" + (b"," * 99_999 + b"x\n") * 150,
    "lists.json": lambda: b"[" + b"[]," * 15_000_000 + b'{"text": 1}]',
    "deep.ipynb": lambda: b'{"cells": ' * 300_000 + b"[]" + b"}" * 300_000,
    "paragraphs.docx": lambda: document(PARAGRAPH * 1_500_000),
    "media.docx": lambda: with_files(files.docx(), {"word/media/x": b"\0" * (600 << 20)}),
    "overlapping.docx": _overlapping,
    "nested.docx": lambda: _nested(5),
    "password.docx": _with_a_password,
    "entities.docx": lambda: with_entity("docx", LAUGHS),
    "wide.xlsx": lambda: sheet("".join(_FAR_CELL.format(row=n, column="XFD") for n in range(1, 1_000_001))),
    "media.xlsx": lambda: with_files(files.xlsx(), {"xl/media/x": b"\0" * (600 << 20)}),
    "deep.pptx": lambda: presentation(Slide(["<p:grpSp>" * 5000 + "</p:grpSp>" * 5000])),
    "media.pptx": lambda: with_files(files.pptx(), {"ppt/media/x": b"\0" * (600 << 20)}),
    "entities.pptx": lambda: with_files(
        presentation(Slide()), {"ppt/slides/slide1.xml": LAUGHS + slide_xml(text("&e;")).partition("?>")[2]}
    ),
    "media.epub": lambda: with_files(files.epub(["<p>a</p>"]), {"x": b"\0" * (600 << 20)}),
    "entities.epub": lambda: with_files(with_entity("epub", LAUGHS), {"OEBPS/text/c 0.xhtml": ""}),
    "pages.pdf": lambda: _pdf(
        _CATALOG,
        b"<< /Type /Pages /Kids [" + b"3 0 R " * 100_000 + b"] /Count 100000 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R >>",
        b"<< /Length 30 >>\nstream\nBT /F1 11 Tf (Hello there) Tj ET\nendstream",
    ),
    **{f"{name.replace(' ', '-').replace(',', '')}.pdf": make for name, make in PDFS.items()},
}
"""Small files without a text that take a careless parser minutes, hours or gigabytes."""
