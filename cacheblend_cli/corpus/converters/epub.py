"""EPUB books, chapter by chapter."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from cacheblend_cli.corpus.converters.archive import opened
from cacheblend_cli.corpus.converters.converter import NoDocument, joined, parsing
from cacheblend_cli.corpus.converters.html import html_text
from cacheblend_cli.corpus.layout import Converted, Mark

_CONTAINER = "META-INF/container.xml"


def from_epub(data: bytes) -> Converted:
    with parsing("defusedxml", what := "a book"):
        from defusedxml.ElementTree import fromstring

        return joined(list(_chapters(opened(data, what), fromstring)), "markdown")


def _chapters(archive: zipfile.ZipFile, fromstring: Callable[[bytes], Any]) -> Iterator[tuple[str, Mark]]:
    root = fromstring(archive.read(_CONTAINER)).find(".//{*}rootfile").get("full-path")
    package = fromstring(archive.read(root))
    files = {item.get("id"): item.get("href") for item in package.findall(".//{*}item")}
    folder, number = posixpath.dirname(root), 0
    for reference in dict.fromkeys(item.get("idref") for item in package.findall(".//{*}itemref")):
        name = posixpath.normpath(posixpath.join(folder, unquote(files[reference])))
        try:
            text = html_text(archive.read(name).decode("utf-8", "replace")).text
        except NoDocument:
            continue
        if text.strip():
            number += 1
            yield text, Mark(0, f"chapter {number}")
