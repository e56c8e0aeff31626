"""Mailboxes (mbox): the mails one after the other, each after a line "From SENDER DATE"."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cacheblend_documents.converter import NoDocument, joined
from cacheblend_documents.layout import Converted, Mark
from cacheblend_documents.mail.mail import read_mail
from cacheblend_documents.omissions import Omissions

_SEPARATOR = re.compile(rb"^From [^\n:]*[A-Za-z]{3} [ \d]\d \d\d:\d\d[^\n]*\n(?=>?[\w-]+:)", re.MULTILINE)
_ESCAPED = re.compile(rb"^>(>*From )", re.MULTILINE)


def from_mailbox(data: bytes) -> Converted:
    converted = joined(_mails(data, omissions := Omissions()), "markdown", apart=True, omissions=omissions)
    if not converted.text:
        raise NoDocument("not a mailbox", "broken e-mails")
    return converted


def _mails(data: bytes, omissions: Omissions) -> Iterator[tuple[str, Mark]]:
    """Yield the texts of the mails with their numbers."""
    separators = list(_SEPARATOR.finditer(data))
    if separators and data[: separators[0].start()].strip():
        omissions.say("the text before the first mail")
    ends = [*(separator.start() for separator in separators[1:]), len(data)]
    for number, (separator, end) in enumerate(zip(separators, ends, strict=False), 1):
        try:
            _, text = read_mail(_ESCAPED.sub(rb"\1", data[separator.end() : end]), omissions)
        except (NoDocument, RecursionError):
            omissions.add("mail cannot be read", f"mail {number}", plural="mails cannot be read")
        else:
            yield text, Mark(0, f"mail {number}")
