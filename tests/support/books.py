"""EPUB books, written as XML."""

from __future__ import annotations

from collections.abc import Mapping

import files

CONTAINER = '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'


def book(
    chapters: Mapping[str, str | bytes | None], *, others: Mapping[str, str] | None = None, spine: str = ""
) -> bytes:
    """Return a book. chapters: name -> page, None for a missing one. spine: replaces the references to the chapters."""
    items = "".join(
        f'<item id="c{n}" href="{name}" media-type="application/xhtml+xml"/>' for n, name in enumerate(chapters)
    )
    references = spine or "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Garden Book</dc:title>'
        f"</metadata><manifest>{items}</manifest><spine>{references}</spine></package>"
    )
    pages = {f"OEBPS/{name}": page for name, page in chapters.items() if page is not None}
    return files.packed({"META-INF/container.xml": CONTAINER, "OEBPS/book.opf": package, **(others or {}), **pages})  # type: ignore[dict-item]


def page(body: str, declared: str = "") -> str:
    declaration = f'<?xml version="1.0" encoding="{declared}"?>' if declared else ""
    return f'{declaration}<html xmlns="http://www.w3.org/1999/xhtml"><head><title>T</title></head><body>{body}</body></html>'


def encryption(algorithm: str, *names: str) -> dict[str, str]:
    """Return META-INF/encryption.xml, which says that these parts are encrypted."""
    one = '<EncryptedData><EncryptionMethod Algorithm="{}"/><CipherData><CipherReference URI="{}"/></CipherData></EncryptedData>'
    return {
        "META-INF/encryption.xml": f"<encryption>{''.join(one.format(algorithm, name) for name in names)}</encryption>"
    }
