"""EPUB books, chapter by chapter, in the order of the spine."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from cacheblend_documents.charsets import decoded_page
from cacheblend_documents.converted import Converted, Mark, NotConverted, joined
from cacheblend_documents.office.package import DamagedPart, OfficePackage
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.web.html import html_text

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_FONTS_ONLY = frozenset(("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"))
"""Algorithms that obfuscate fonts."""
_MOST_FALLBACKS = 16  # of an item of the manifest
_PAGES = (".xhtml", ".html", ".htm")
_PAGE_TYPES = ("", "application/xhtml+xml", "text/html", "text/x-oeb1-document", "application/x-dtbook+xml", "text/xml")


def from_epub(data: bytes) -> Converted:
    return _Book(OfficePackage(data, "an EPUB book")).converted()


@dataclass
class _Spine:
    """Chapters of a book in reading order. parts: names; those in `missing` are named but not in the archive."""

    parts: list[str]
    missing: list[str] = field(default_factory=list)
    title: str = ""


class _Book:
    """Chapters of a package, and the omissions so far."""

    def __init__(self, package: OfficePackage) -> None:
        self._package = package
        self._omissions = Omissions()
        self._encrypted = self._encrypted_parts()

    def converted(self) -> Converted:
        spine = self._spine()
        for name in spine.missing:
            self._omissions.add("chapter is missing", name, plural="chapters are missing")
        return joined(self._chapters(spine.parts), "markdown", title=spine.title, omissions=self._omissions)

    def _spine(self) -> _Spine:
        """Return the chapters; all pages by name if the package document cannot be read."""
        for name in {name.lower(): name for name in self._package_documents()}.values():
            try:
                return _spine(self._package.xml(name), posixpath.dirname(name), self._package)
            except DamagedPart:
                continue
        pages = sorted(name for name in self._package.names if name.endswith(_PAGES))
        if not pages:
            raise NotConverted("not an EPUB book", "damaged or locked")
        self._omissions.say("the order of the chapters is unknown")
        return _Spine(pages)

    def _package_documents(self) -> Iterator[str]:
        """Yield the package documents: those that the container names, then others."""
        with suppress(DamagedPart):
            for element in self._package.xml(_CONTAINER).iter("rootfile"):
                yield posixpath.normpath(unquote(element.get("full-path", "")).lstrip("/"))
        yield from sorted(name for name in self._package.names if name.endswith(".opf"))

    def _encrypted_parts(self) -> frozenset[str]:
        with suppress(DamagedPart):
            return frozenset(
                posixpath.normpath(unquote(reference.get("URI", ""))).lower()
                for element in self._package.xml(_ENCRYPTION).iter("EncryptedData")
                if not any(method.get("Algorithm") in _FONTS_ONLY for method in element.iter("EncryptionMethod"))
                for reference in element.iter("CipherReference")
            )
        return frozenset()

    def _chapters(self, names: list[str]) -> Iterator[tuple[str, Mark]]:
        number, num_encrypted = 0, 0
        for name in names:
            base = posixpath.basename(name)
            try:
                page = self._page(name)
            except DamagedPart:
                self._omissions.add("chapter cannot be read", base, plural="chapters cannot be read")
                continue
            if page is None:
                num_encrypted += 1
                self._omissions.add("chapter is encrypted", base, plural="chapters are encrypted")
            elif text := _text(page):
                number += 1
                yield text, Mark(0, f"chapter {number}")
        if num_encrypted and not number:
            raise NotConverted("encrypted, with digital rights management (DRM)", "encrypted books")

    def _page(self, name: str) -> str | None:
        """Return the decoded page of a chapter, None if it is encrypted. Raises DamagedPart."""
        data = self._package.data(name)
        if name.lower() in self._encrypted:
            return None
        try:
            return decoded_page(data, self._omissions)
        except NotConverted as error:
            if b"\0" in data and _ENCRYPTION in self._package:
                return None
            raise DamagedPart(name) from error


def _text(page: str) -> str:
    try:
        return html_text(page, xhtml=True).text.strip()
    except NotConverted:
        return ""


def _spine(root: Element, folder: str, package: OfficePackage) -> _Spine:
    """Return the chapters of a package document. Raises DamagedPart if it names none."""
    items = {item.get("id", ""): item for item in root.iter("item")}
    found, missing = dict[str, None](), dict[str, None]()
    for identifier in dict.fromkeys(reference.get("idref", "") for reference in root.iter("itemref")):
        item = _readable(identifier, items)
        if item is None:
            missing[identifier] = None
            continue
        href = item.get("href", "").partition("#")[0]
        paths = [posixpath.normpath(posixpath.join(folder, one)).lstrip("/") for one in (unquote(href), href)]
        name = next((path for path in paths if path in package), "")
        if name:
            found[name] = None
        else:
            missing[href] = None
    if not found and not missing:
        raise DamagedPart(folder)
    title = next((" ".join(element.itertext()) for element in root.iter("title")), "")
    return _Spine(list(found), list(missing), " ".join(title.split()))


def _readable(identifier: str, items: dict[str, Element]) -> Element | None:
    """Return an item of the manifest, or the fallback that is a page; None if it is not in the manifest."""
    first, seen = items.get(identifier), set[str]()
    item = first
    while item is not None and item.get("media-type", "").lower() not in _PAGE_TYPES and len(seen) < _MOST_FALLBACKS:
        seen.add(identifier)
        identifier = item.get("fallback", "")
        item = items.get(identifier)
    return item if item is not None else first
