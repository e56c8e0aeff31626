"""Parts of Word documents in other formats (w:altChunk), which Word converts when it opens the document."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from cacheblend_documents.converted import Converted, NotConverted, refusing_damage
from cacheblend_documents.mail.mail import from_mail
from cacheblend_documents.office.package import OfficePackage, Relation
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import from_plain
from cacheblend_documents.web.html import from_html
from cacheblend_documents.word.rtf import from_rtf

_CONVERTERS: dict[str, Callable[[bytes], Converted]] = {
    **dict.fromkeys(("text/html", "application/xhtml+xml"), from_html),
    **dict.fromkeys(("message/rfc822", "multipart/related"), from_mail),  # MHTML
    **dict.fromkeys(("text/rtf", "application/rtf"), from_rtf),
    "text/plain": from_plain,
}
"""Media type -> converter."""


def embedded_text(package: OfficePackage, relation: Relation | None, omissions: Omissions, place: str) -> str:
    """Return the text of a related part, "" if it was given before.

    A part in another format, and a missing or damaged one, is an omission.
    """
    if relation is not None and not relation.external:
        if relation.target in package.drawn:
            return ""
        package.drawn.add(relation.target)
        converter = _CONVERTERS.get(package.content_type(relation.target))
        if converter is not None:
            with suppress(NotConverted), refusing_damage():
                converted = converter(package.data(relation.target))
                for sentence in converted.omissions:
                    omissions.say(sentence)
                return converted.text.strip("\n")
    omissions.add("embedded document", place)
    return ""
