"""Reference texts of documents, read without the product's converters and libraries.

PDF is read by pdftotext, RTF by pandoc, .xls by xls2csv of catdoc, where these are installed; everything else by the
standard library from the format's own text: the text elements of Office parts, the pages of a book, the parts of a
mail, the cells of a table, the sources of a notebook.
"""

from __future__ import annotations

import csv
import email
import email.policy
import io
import json
import posixpath
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from defusedxml import ElementTree
from document_pages import decoded_page, page_text
from office_references import docx_text, ods_text, pptx_text, xls_text, xlsx_text
from reference_sources import NoReference, output_of, package_of


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
    return output_of("pdftotext", "-enc", "UTF-8", str(path), "-")


def _rtf(path: Path) -> str:
    return output_of("pandoc", "-f", "rtf", "-t", "plain", "--wrap=none", str(path))


def _html(path: Path) -> str:
    return page_text(decoded_page(path.read_bytes()))


def _epub(path: Path) -> str:
    """Return the text of the pages in the spine."""
    with package_of(path) as book:
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
    elif message.get_content_type() in ("message/partial", "message/external-body"):
        return  # a piece of a message, or a link
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
    ".pdf": _pdf, ".rtf": _rtf, ".docx": docx_text, ".docm": docx_text, ".dotx": docx_text, ".pptx": pptx_text, ".pptm": pptx_text,
    ".xlsx": xlsx_text, ".xlsm": xlsx_text, ".xltx": xlsx_text, ".epub": _epub, ".eml": _eml, ".html": _html, ".htm": _html, ".xhtml": _html,
    ".xls": xls_text, ".ods": ods_text, ".csv": _table, ".tsv": _table, ".json": _json, ".jsonl": _json_lines, ".ipynb": _notebook,
}  # fmt: skip
