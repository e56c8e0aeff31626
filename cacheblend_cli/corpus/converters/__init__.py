"""Converters from files to text: one package for each family of formats. Register a new converter here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import PurePath

from cacheblend_cli.corpus.converters.converter import (
    CODE_SUFFIXES,
    Converter,
    from_code,
    from_markdown,
    from_plain,
    from_rst,
)
from cacheblend_cli.corpus.converters.json_records import from_json_lines, from_json_records
from cacheblend_cli.corpus.converters.mail.mail import from_mail
from cacheblend_cli.corpus.converters.notebooks import from_notebook
from cacheblend_cli.corpus.converters.pdf.pdf import from_pdf
from cacheblend_cli.corpus.converters.sheets.delimited import from_csv, from_tsv
from cacheblend_cli.corpus.converters.sheets.old_sheets import from_old_sheets
from cacheblend_cli.corpus.converters.sheets.xlsx import from_xlsx
from cacheblend_cli.corpus.converters.slides.pptx import from_pptx
from cacheblend_cli.corpus.converters.web.epub import from_epub
from cacheblend_cli.corpus.converters.web.html import from_html
from cacheblend_cli.corpus.converters.word.docx import from_docx
from cacheblend_cli.corpus.converters.word.rtf import from_rtf

CONVERTERS: dict[Converter, str] = {
    from_markdown: ".md .markdown .mdx .qmd .rmd",
    from_rst: ".rst",
    from_plain: ".txt .text .adoc .asciidoc .org .log",
    from_code: CODE_SUFFIXES,
    from_html: ".html .htm .xhtml",
    from_csv: ".csv",
    from_tsv: ".tsv .tab",
    from_json_lines: ".jsonl .ndjson",
    from_json_records: ".json",
    from_notebook: ".ipynb",
    from_mail: ".eml",
    from_rtf: ".rtf",
    from_pdf: ".pdf",
    from_docx: ".docx .docm .dotx .dotm",
    from_pptx: ".pptx .pptm .potx .potm .ppsx .ppsm",
    from_xlsx: ".xlsx .xlsm .xltx .xltm",
    from_old_sheets: ".xls .xlsb .ods",
    from_epub: ".epub",
}
"""Converter -> lower-case file suffixes."""
PLAIN = frozenset((from_markdown, from_rst, from_plain, from_code))
"""Converters that only decode. The others parse, within the limits of `converters/process.py`."""
_MODULES = {
    from_pdf: "pypdfium2",
    from_docx: "defusedxml",
    from_pptx: "defusedxml",
    from_xlsx: "defusedxml",
    from_old_sheets: "python_calamine",
    from_epub: "defusedxml",
}
"""Converters that need the extra `documents` -> module that they import."""
_BY_SUFFIX = {suffix: converter for converter, suffixes in CONVERTERS.items() for suffix in suffixes.split()}
_WITHOUT_SUFFIX = dict.fromkeys("makefile dockerfile rakefile gemfile justfile".split(), from_code)


def converter_of(name: str) -> Converter | None:
    """Return the converter for a file name; None for an unknown suffix. A name without a suffix can be text."""
    path = PurePath(name)
    return _BY_SUFFIX.get(path.suffix.lower()) if path.suffix else _WITHOUT_SUFFIX.get(path.name.lower(), from_plain)


def readable_suffixes() -> list[str]:
    """Return the sorted file suffixes that the installed libraries can convert."""
    missing = {converter for converter, module in _MODULES.items() if find_spec(module) is None}
    return sorted(suffix for suffix, converter in _BY_SUFFIX.items() if converter not in missing)
