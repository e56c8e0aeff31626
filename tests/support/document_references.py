"""Reference texts of documents, read without the product's converters and libraries.

PDF by pdftotext, RTF by pandoc (where installed), everything else by the standard library from the format's own
text: the text elements of Office parts, the parts of a mail, the cells of a table, the sources of a notebook.
"""

from __future__ import annotations

import csv
import email
import email.policy
import io
import json
import posixpath
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from defusedxml import ElementTree
from document_pages import decoded_page, page_text

_SECONDS = 60  # for one run of a reference program
_MOST_BYTES = 32 << 20  # of an unpacked package, and of its text: files made to exhaust the memory have no reference


class NoReference(Exception):
    """Raised for a file without a reference: it is damaged, or the program is not installed."""


def reference_text(path: Path) -> str:
    """Return the text that a reader of the file sees. Raises NoReference."""
    read = _REFERENCES[path.suffix.lower()]
    try:
        return read(path)
    except NoReference:
        raise
    except Exception as error:  # whatever the standard library makes of a damaged file
        raise NoReference(str(error)) from error


def _pdf(path: Path) -> str:
    return _output("pdftotext", "-enc", "UTF-8", str(path), "-")


def _rtf(path: Path) -> str:
    return _output("pandoc", "-f", "rtf", "-t", "plain", "--wrap=none", str(path))


def _output(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        raise NoReference(f"{program} is not installed")
    done = subprocess.run([program, *arguments], capture_output=True, timeout=_SECONDS)
    if done.returncode:
        raise NoReference(f"{program} exits {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def _docx(path: Path) -> str:
    return _office(
        path,
        r"word/(document\d*|header\d*|footer\d*|footnotes|endnotes|comments)\.xml|word/(charts/chart\d*|diagrams/data\d*)\.xml",
    )


def _pptx(path: Path) -> str:
    return _office(
        path,
        r"ppt/(slides|notesSlides|comments|charts|diagrams)/(slide|notesSlide|comment|modernComment|chart|data)[\w-]*\.xml",
    )


@contextmanager
def _package(path: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(path) as package:
        if sum(member.file_size for member in package.infolist()) > _MOST_BYTES:
            raise NoReference("is too large unpacked")
        yield package


def _office(path: Path, parts: str) -> str:
    with _package(path) as package:
        names = [name for name in package.namelist() if re.fullmatch(parts, name.replace("\\", "/").lstrip("/"))]
        return "\n".join("".join(_shown(ElementTree.fromstring(package.read(name)))) for name in names)


_SPACES = frozenset("p tc tab br cr pt r_ txBody txbxContent".split())
_NOT_SHOWN = frozenset("Fallback moveFrom del rPh rt_ delText instrText".split())
_TEXTS = frozenset("t text v".split())  # of runs and comments, and values of charts


def _shown(element: Any) -> Iterator[str]:
    """Text elements in document order. Fields for the slide number and the date are left out."""
    name = element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
    if name in _NOT_SHOWN or (name == "fld" and element.get("type", "").startswith(("slidenum", "datetime"))):
        return
    if name == "numCache" and _is_date(element.findtext("{*}formatCode") or ""):
        return
    if name in _TEXTS and element.text:
        yield element.text if name == "t" else f"{_number(element.text)}\n"
    for child in element:
        yield from _shown(child)
    if name in _SPACES:
        yield "\n"


def _xlsx(path: Path) -> str:
    """Return texts and numbers of the cells. Dates are numbers whose form depends on a style: they are left out."""
    with _package(path) as package:
        names = package.namelist()
        shared = list[str]()
        for name in (n for n in names if n.lower().endswith("sharedstrings.xml")):
            shared = ["".join(_shown(item)) for item in ElementTree.fromstring(package.read(name))]
        styles = next((n for n in names if n.lower().endswith("xl/styles.xml")), None)
        dates = _date_styles(ElementTree.fromstring(package.read(styles))) if styles else set[int]()
        cells, num_characters = list[str](), 0
        for name in (n for n in names if re.fullmatch(r"xl/worksheets/[^/]+\.xml", n)):
            for cell in ElementTree.fromstring(package.read(name)).iterfind(".//{*}c"):
                cells.append(_cell(cell, shared, dates))
                num_characters += len(cells[-1])
                if num_characters > _MOST_BYTES:
                    raise NoReference("has too much text")
        drawn = (n for n in names if re.fullmatch(r"xl/(comments\d*|drawings/drawing\d*|charts/chart\d*)\.xml", n))
        return "\n".join(cells + ["".join(_shown(ElementTree.fromstring(package.read(name)))) for name in drawn])


def _cell(cell: Any, shared: list[str], dates: set[int]) -> str:
    value, kind = cell.findtext("{*}v") or "", cell.get("t", "n")
    if kind == "s":
        return shared[int(value)] if value else ""
    if kind == "inlineStr":
        return "".join(_shown(cell))
    if kind == "b":
        return str(value == "1")
    if kind != "n":
        return "" if kind in ("e", "d") else value
    if not value or int(cell.get("s", 0)) in dates:
        return ""
    return _number(value)


def _number(text: str) -> str:
    """Return a number with at most 15 digits, as spreadsheets show it; any other text unchanged."""
    try:
        return f"{float(text):.15g}"
    except ValueError:
        return text


def _date_styles(styles: Any) -> set[int]:
    codes = {int(f.get("numFmtId")): f.get("formatCode", "") for f in styles.iterfind(".//{*}numFmt")}
    cells = [int(xf.get("numFmtId", 0)) for xf in styles.iterfind("{*}cellXfs/{*}xf")]
    built_in = {*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)}
    return {index for index, number in enumerate(cells) if number in built_in or _is_date(codes.get(number, ""))}


def _is_date(format_code: str) -> bool:
    return bool(re.search("[ymdhs]", re.sub(r'"[^"]*"|\[[^\]]*\]|\\.|general', "", format_code.lower())))


def _html(path: Path) -> str:
    return page_text(decoded_page(path.read_bytes()))


def _epub(path: Path) -> str:
    """Return the text of the pages in the spine."""
    with _package(path) as book:
        container = ElementTree.fromstring(book.read("META-INF/container.xml"))
        root = container.find(".//{*}rootfile").get("full-path")
        package = ElementTree.fromstring(book.read(root))
        files = {item.get("id"): item.get("href", "") for item in package.iterfind(".//{*}manifest/{*}item")}
        pages = [files[item.get("idref")] for item in package.iterfind(".//{*}spine/{*}itemref")]
        paths = (posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(page))) for page in pages)
        return "\n".join(page_text(decoded_page(book.read(name))) for name in paths if name in book.namelist())


def _eml(path: Path) -> str:
    """Return the subject, the texts that are not attachments, and the plain form of alternatives."""
    message = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    return "\n".join((str(message["Subject"] or ""), *_mail_texts(message)))


def _mail_texts(message: EmailMessage) -> Iterator[str]:
    if message.get_content_type() == "multipart/alternative":
        forms = [part for part in message.iter_parts() if not part.is_attachment()]
        plain = [part for part in forms if part.get_content_type() == "text/plain"]
        for part in (plain or forms)[-1:]:
            yield from _mail_texts(part)
    elif message.is_multipart():
        for part in message.get_payload():
            yield from _mail_texts(part)
    elif message.get_content_maintype() == "text" and not message.is_attachment():
        data = message.get_payload(decode=True)
        charset = message.get_content_charset("utf-8")
        try:
            text = data.decode(charset)
        except (UnicodeDecodeError, LookupError):
            text = data.decode("utf-8", "replace")
        yield page_text(text) if message.get_content_subtype() == "html" else text


def _table(path: Path) -> str:
    text = decoded_page(path.read_bytes())
    csv.field_size_limit(1 << 27)
    return "\n".join(
        "\n".join(row)
        for row in csv.reader(io.StringIO(text, newline=""), "excel-tab" if path.suffix == ".tsv" else "excel")
    )


def _json(path: Path) -> str:
    return "\n".join(_leaves(json.loads(path.read_bytes())))


def _json_lines(path: Path) -> str:
    return "\n".join(
        leaf for line in path.read_text("utf-8").splitlines() if line.strip() for leaf in _leaves(json.loads(line))
    )


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif value is not None and not isinstance(value, bool):
        yield value if isinstance(value, str) else json.dumps(value)


def _notebook(path: Path) -> str:
    """Return the sources of the cells, in the formats 3 and 4."""
    notebook = json.loads(path.read_bytes())
    sheets = notebook.get("worksheets") or [notebook]
    sources = (cell.get("source", cell.get("input", "")) for sheet in sheets for cell in sheet["cells"])
    return "\n".join(source if isinstance(source, str) else "".join(source) for source in sources)


_REFERENCES: dict[str, Callable[[Path], str]] = {
    ".pdf": _pdf, ".rtf": _rtf, ".docx": _docx, ".docm": _docx, ".dotx": _docx, ".pptx": _pptx, ".pptm": _pptx,
    ".xlsx": _xlsx, ".xlsm": _xlsx, ".xltx": _xlsx, ".epub": _epub, ".eml": _eml, ".html": _html, ".htm": _html, ".xhtml": _html,
    ".csv": _table, ".tsv": _table, ".json": _json, ".jsonl": _json_lines, ".ipynb": _notebook,
}  # fmt: skip
