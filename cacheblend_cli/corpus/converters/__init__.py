"""Converters: files to text, one file a kind. To add one, write it and name it here."""

from __future__ import annotations

from pathlib import PurePath

from cacheblend_cli.corpus.converters.converter import Converter
from cacheblend_cli.corpus.converters.docx import DocxConverter
from cacheblend_cli.corpus.converters.epub import EpubConverter
from cacheblend_cli.corpus.converters.html import HtmlConverter
from cacheblend_cli.corpus.converters.json_records import JsonConverter, JsonLinesConverter
from cacheblend_cli.corpus.converters.mail import MailConverter
from cacheblend_cli.corpus.converters.notebook import NotebookConverter
from cacheblend_cli.corpus.converters.pdf import PdfConverter
from cacheblend_cli.corpus.converters.pptx import PptxConverter
from cacheblend_cli.corpus.converters.tables import CSV, TSV
from cacheblend_cli.corpus.converters.text import CODE, MARKDOWN, NAMES, PLAIN, RST
from cacheblend_cli.corpus.converters.xlsx import XlsxConverter

CONVERTERS: tuple[Converter, ...] = (
    MARKDOWN,
    RST,
    PLAIN,
    CODE,
    HtmlConverter(),
    CSV,
    TSV,
    JsonLinesConverter(),
    JsonConverter(),
    NotebookConverter(),
    MailConverter(),
    PdfConverter(),
    DocxConverter(),
    PptxConverter(),
    XlsxConverter(),
    EpubConverter(),
)
_BY_SUFFIX = {suffix: converter for converter in CONVERTERS for suffix in converter.suffixes}


def converter_of(name: str) -> Converter | None:
    """What converts a file of that name; None when its suffix, or name without one, is not known."""
    path = PurePath(name)
    if path.suffix:
        return _BY_SUFFIX.get(path.suffix.lower())
    return NAMES.get(path.name.lower())
