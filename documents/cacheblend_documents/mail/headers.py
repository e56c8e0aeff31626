"""Header lines of e-mails as people read them."""

from __future__ import annotations

from email._policybase import Compat32
from email.errors import MessageError
from email.header import decode_header
from email.message import Message

from cacheblend_documents.charsets import codec_of
from cacheblend_documents.omissions import Omissions

_SHOWN = ("From", "To", "Cc", "Date")
_LONGEST = 8000  # characters of a header line to read; parsing takes quadratic time


class MailPolicy(Compat32):
    """Header values are text of a bounded length. Unlike the default policy, it reads boundaries with "=" in them."""

    def header_fetch_parse(self, name: str, value: str) -> str:
        value = value[:_LONGEST]
        if value.isascii():
            return value
        data = value.encode("utf-8", "surrogateescape")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data.decode("cp1252", "replace")


def header_text(message: Message, name: str) -> str:
    """Return a header as one line, with its encoded words decoded."""
    return unencoded(str(message.get(name, "")))


def header_lines(message: Message, omissions: Omissions) -> list[str]:
    """Return the sender, recipients and date."""
    for name in _SHOWN:
        if len(str(message.get(name, ""))) == _LONGEST:
            omissions.say(f"the {name} line after {_LONGEST:,} characters")
    return [f"{name}: {text}" for name in _SHOWN if (text := header_text(message, name))]


def unencoded(value: str) -> str:
    """Decode the encoded words of RFC 2047: "=?utf-8?Q?Gr=C3=B6=C3=9Fe?="."""
    try:
        parts = decode_header(value)
    except (MessageError, ValueError):
        return " ".join(value.split())
    return " ".join("".join(_decoded(part, charset) for part, charset in parts).split())


def _decoded(part: bytes | str, charset: str | None) -> str:
    if isinstance(part, str):
        return part
    if charset is None:
        return part.decode("raw-unicode-escape", "replace")
    return part.decode(codec_of(charset.partition("*")[0]) or "cp1252", "replace")
