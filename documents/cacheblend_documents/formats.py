"""Converters from files to text: one package for each family of formats. Register a new converter here."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from functools import cache
from importlib.util import find_spec
from pathlib import PurePath
from pkgutil import resolve_name

from cacheblend_documents.converter import (
    CODE_SUFFIXES,
    Converter,
    from_code,
    from_markdown,
    from_plain,
    from_rst,
)

CONVERTERS = {
    "converter:from_markdown": ".md .markdown .mdx .qmd .rmd",
    "converter:from_rst": ".rst",
    "converter:from_plain": ".txt .text .adoc .asciidoc .org .log",
    "converter:from_code": CODE_SUFFIXES,
    "latex:from_latex": ".tex .ltx",
    "latex:from_bibliography": ".bib",
    "web.html:from_html": ".html .htm .xhtml",
    "web.xml:from_xml": ".xml .rss .atom .dita",
    "sheets.delimited:from_csv": ".csv",
    "sheets.delimited:from_tsv": ".tsv .tab",
    "json_records:from_json_lines": ".jsonl .ndjson",
    "json_records:from_json_records": ".json",
    "notebooks:from_notebook": ".ipynb",
    "mail.mail:from_mail": ".eml .mht .mhtml",
    "mail.mailbox:from_mailbox": ".mbox",
    "mail.calendar_events:from_calendar": ".ics",
    "mail.contacts:from_contacts": ".vcf",
    "word.rtf:from_rtf": ".rtf",
    "pdf.pdf:from_pdf": ".pdf",
    "word.docx:from_docx": ".docx .docm .dotx .dotm",
    "slides.pptx:from_pptx": ".pptx .pptm .potx .potm .ppsx .ppsm",
    "sheets.xlsx:from_xlsx": ".xlsx .xlsm .xltx .xltm",
    "sheets.old_sheets:from_old_sheets": ".xls .xlsb .ods",
    "web.epub:from_epub": ".epub",
}
"""Module and converter -> lower-case file suffixes. A module is imported with the first file that needs it."""
PLAIN = frozenset((from_markdown, from_rst, from_plain, from_code))
"""Converters that only decode. The others parse, within the limits of `converters/process.py`."""
_LIBRARIES = {
    "pdf.pdf:from_pdf": "pypdfium2",
    "word.docx:from_docx": "defusedxml",
    "slides.pptx:from_pptx": "defusedxml",
    "sheets.xlsx:from_xlsx": "defusedxml",
    "sheets.old_sheets:from_old_sheets": "python_calamine",
    "web.epub:from_epub": "defusedxml",
}
"""Converters that need the extra `documents` -> module that they import."""
_BY_SUFFIX = {suffix: converter for converter, suffixes in CONVERTERS.items() for suffix in suffixes.split()}
_imported = cache(resolve_name)
_WITHOUT_SUFFIX = dict.fromkeys("makefile dockerfile rakefile gemfile justfile".split(), from_code)
_BEGINNING = re.compile(
    rb"(?P<xml>\s*<\?xml\s)|(?P<ics>\s*BEGIN:VCALENDAR\b)|(?P<vcf>\s*BEGIN:VCARD\b)|(?P<mbox>From [^\n:]*[a-z]{3} [ \d]\d \d\d:\d\d[^\n]*\n>?[\w-]+:)"
    rb"|(?P<eml>(?:[\w-]+:[^\n]*\n(?:[ \t][^\n]*\n)*)*?MIME-Version:)",
    re.IGNORECASE,
)
"""Beginnings of files whose text is encoded or marked up, named by a suffix of such files."""
_START = 1 << 14  # bytes of a file that tell its kind


def converter_of(name: str) -> Converter | None:
    """Return the converter for a file name; None for an unknown suffix. A name without a suffix can be text."""
    path = PurePath(name)
    if not path.suffix:
        return _WITHOUT_SUFFIX.get(path.name.lower(), from_plain)
    found = _BY_SUFFIX.get(path.suffix.lower())
    return None if found is None else _imported(f"{__package__}.{found}")


def named_by_content(name: str, data: bytes) -> str:
    """Return the file name, with a suffix by the file's content if it has none, or an unknown one."""
    if PurePath(name).suffix and converter_of(name) is not None:
        return name
    found = _BEGINNING.match(data[:_START].removeprefix(BOM_UTF8))
    return f"{name}.{found.lastgroup}" if found else name


def readable_suffixes() -> list[str]:
    """Return the sorted file suffixes that the installed libraries can convert."""
    missing = {converter for converter, module in _LIBRARIES.items() if find_spec(module) is None}
    return sorted(suffix for suffix, converter in _BY_SUFFIX.items() if converter not in missing)
