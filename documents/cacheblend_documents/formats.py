"""Formats by file suffix, and their converters. Register a new one here; another distribution has entry points."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import PurePath
from pkgutil import resolve_name
from typing import NamedTuple

from cacheblend_documents.converted import Converted, NotConverted

CONVERTERS = {
    "plain_text:from_markdown": ".md .markdown .mdx .qmd .rmd",
    "plain_text:from_rst": ".rst",
    "plain_text:from_plain": ".txt .text .adoc .asciidoc .org .log",
    "plain_text:from_code": (
        ".py .pyi .pyx .js .jsx .mjs .cjs .ts .tsx .vue .svelte .java .kt .kts .scala .groovy .go .rs .c .h .cc .cpp .cxx .hh .hpp "
        ".hxx .cu .cuh .m .mm .cs .fs .vb .swift .rb .php .pl .pm .lua .r .jl .dart .ex .exs .erl .hrl .hs .ml .mli .clj .cljs "
        ".lisp .el .scm .nim .zig .d .pas .f90 .asm .s .sh .bash .zsh .fish .ps1 .bat .sql .graphql .proto .thrift .tf .nix "
        ".cmake .mk .gradle .css .scss .less .yaml .yml .toml .ini .cfg .conf"
    ),
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
    "mail.mail:from_mailbox": ".mbox",
    "mail.calendar_events:from_calendar": ".ics",
    "mail.contacts:from_contacts": ".vcf",
    "word.rtf:from_rtf": ".rtf",
    "pdf.pages:from_pdf": ".pdf",
    "word.docx:from_docx": ".docx .docm .dotx .dotm",
    "slides.pptx:from_pptx": ".pptx .pptm .potx .potm .ppsx .ppsm",
    "sheets.xlsx:from_xlsx": ".xlsx .xlsm .xltx .xltm",
    "sheets.old_sheets:from_old_sheets": ".xls .xlsb .ods",
    "web.epub:from_epub": ".epub",
}
"""Module and converter -> lower-case file suffixes. A module is imported with the first file that needs it."""
_PLAIN_TEXT = "plain_text:"
_LIBRARIES = {
    "pdf.pages:from_pdf": "pypdfium2",
    "word.docx:from_docx": "defusedxml",
    "slides.pptx:from_pptx": "defusedxml",
    "sheets.xlsx:from_xlsx": "defusedxml",
    "sheets.old_sheets:from_old_sheets": "python_calamine",
    "web.epub:from_epub": "defusedxml",
}
"""Converters that need the extra `documents` -> module that they import."""
_WITHOUT_TEXT = {
    "archives are not read: unpack them": ".zip .tar .gz .tgz .bz2 .xz .zst .7z .rar .jar .whl",
    "images have no text": ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .heic .ico",
    "audio and video have no text": ".mp3 .wav .flac .ogg .m4a .aac .opus .mp4 .mov .avi .mkv .webm",
    "old Office formats are not read: save as .docx or .pptx": ".doc .ppt",
    "OpenDocument texts and slides are not read: save as .docx or .pptx": ".odt .odp",
    "Outlook messages are not read: save as .eml": ".msg",
}
_REASON_OF_SUFFIX = {suffix: why for why, suffixes in _WITHOUT_TEXT.items() for suffix in suffixes.split()}
_GROUP = "cacheblend.converters"
_BEGINNING = re.compile(
    rb"(?P<xml>\s*<\?xml\s)|(?P<ics>\s*BEGIN:VCALENDAR\b)|(?P<vcf>\s*BEGIN:VCARD\b)|(?P<mbox>From [^\n:]*[a-z]{3} [ \d]\d \d\d:\d\d[^\n]*\n>?[\w-]+:)"
    rb"|(?P<eml>(?:[\w-]+:[^\n]*\n(?:[ \t][^\n]*\n)*)*?MIME-Version:)",
    re.IGNORECASE,
)
"""Beginnings of files whose text is encoded or marked up, named by a suffix of such files."""
_START = 1 << 14  # bytes of a file that tell its kind


class Format(NamedTuple):
    """How files of a suffix are converted."""

    converter: str  # "web.html:from_html", below this package; of another distribution an absolute name
    distributions: tuple[str, ...] = ()  # names and versions of the others that convert the suffix

    @property
    def is_plain(self) -> bool:
        """Return whether the text is only decoded. Other converters parse, within limits."""
        return self.converter.startswith(_PLAIN_TEXT) and not self.distributions

    def load(self) -> Callable[[bytes], Converted]:
        """Import the converter of a file's bytes. Raises NotConverted if another distribution's cannot be used."""
        if len(self.distributions) > 1:
            several = ", ".join(self.distributions)
            raise NotConverted(f"several distributions convert it, uninstall all but one: {several}", unread=True)
        if not self.distributions:
            return _imported(f"{__package__}.{self.converter}")
        try:
            return _imported(self.converter)
        except Exception as error:
            reason = f"its converter, of {self.distributions[0]}, cannot be imported: {type(error).__name__}: {error}"
            raise NotConverted(reason, "needing other packages", unread=True) from error


TEXT = Format("plain_text:from_plain")
_BY_SUFFIX = {suffix: Format(converter) for converter, suffixes in CONVERTERS.items() for suffix in suffixes.split()}
_WITHOUT_SUFFIX = dict.fromkeys("makefile dockerfile rakefile gemfile justfile".split(), _BY_SUFFIX[".py"])


@cache
def _imported(name: str) -> Callable[[bytes], Converted]:
    found: Callable[[bytes], Converted] = resolve_name(name)
    return found


def format_of(name: str) -> Format | None:
    """Return the format of a file name; None for an unknown suffix. A name without a suffix can be text."""
    path = PurePath(name)
    if not path.suffix:
        return _WITHOUT_SUFFIX.get(path.name.lower(), TEXT)
    suffix = path.suffix.lower()
    return _BY_SUFFIX.get(suffix) or _installed().get(suffix)


def named_by_content(name: str, data: bytes) -> str:
    """Return the file name, with a suffix by the file's content if it has none, or an unknown one."""
    if PurePath(name).suffix and format_of(name) is not None:
        return name
    found = _BEGINNING.match(data[:_START].removeprefix(BOM_UTF8))
    return f"{name}.{found.lastgroup}" if found else name


def reason_of_suffix(name: str) -> str:
    """Return why files with the suffix of this name have no text here, "" if unknown or if they are converted."""
    why = _REASON_OF_SUFFIX.get(PurePath(name).suffix.lower(), "")
    return why if why and format_of(name) is None else ""


def readable_suffixes() -> list[str]:
    """Return the sorted file suffixes that the installed libraries can convert."""
    missing = {converter for converter, module in _LIBRARIES.items() if find_spec(module) is None}
    own = (suffix for suffix, found in _BY_SUFFIX.items() if found.converter not in missing)
    return sorted({*own, *_installed()})


@cache
def _installed() -> dict[str, Format]:
    """Return the formats of other distributions by suffix: entry points such as `odt = "package:from_odt"`."""
    from importlib.metadata import entry_points  # slow

    found = dict[str, Format]()
    for point in sorted(entry_points(group=_GROUP)):
        suffix = f".{point.name.removeprefix('.').lower()}"
        distribution = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
        before = found[suffix].distributions if suffix in found else ()
        found[suffix] = Format(point.value, (*before, distribution))
    return found
