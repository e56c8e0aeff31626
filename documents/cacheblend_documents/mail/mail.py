"""E-mail and mailboxes: sender, recipients, date, subject and text, with forwarded messages. Attachments are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message

from cacheblend_documents.charsets import decoded_page, decoded_text
from cacheblend_documents.converted import Converted, Mark, NotConverted, joined
from cacheblend_documents.mail.calendar_events import events_text
from cacheblend_documents.mail.headers import MailPolicy, header_lines, header_text, unencoded
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import decoded, marked_codec
from cacheblend_documents.web.html import html_text

_DEEPEST = 20  # parts within parts, forwarded messages included
_MOST_PARTS = 1000
_SILENT = frozenset(
    "application/pgp-signature application/pkcs7-signature application/x-pkcs7-signature application/applefile text/css".split()
)
_ARMOUR = "-----BEGIN PGP MESSAGE-----"
_QUOTE = re.compile(r">*")
_SEPARATOR = re.compile(rb"^From [^\n:]*[A-Za-z]{3} [ \d]\d \d\d:\d\d[^\n]*\n(?=>?[\w-]+:)", re.MULTILINE)
_ESCAPED = re.compile(rb"^>(>*From )", re.MULTILINE)


def from_mail(data: bytes) -> Converted:
    if marked_codec(data):
        data = decoded(data).encode()
    subject, text = read_mail(data, omissions := Omissions())
    return Converted(text + "\n", "markdown", keeps_lines=False, title=subject, omissions=tuple(omissions))


def read_mail(data: bytes, omissions: Omissions) -> tuple[str, str]:
    """Return the subject, and the whole text with headers. Raises NotConverted if there are no headers."""
    message = message_from_bytes(data.lstrip(), policy=MailPolicy())
    if not message.keys():
        raise NotConverted("not an e-mail", "broken e-mails")
    return header_text(message, "Subject"), _Mail(omissions).text_of(message, 0)


def from_mailbox(data: bytes) -> Converted:
    return joined(_mails(data, omissions := Omissions()), "markdown", is_split=True, omissions=omissions)


def _mails(data: bytes, omissions: Omissions) -> Iterator[tuple[str, Mark]]:
    """Yield the texts of the mails with their numbers."""
    separators = list(_SEPARATOR.finditer(data))
    if not separators:
        raise NotConverted("not a mailbox", "broken e-mails")
    if data[: separators[0].start()].strip():
        omissions.say("the text before the first mail")
    ends = [*(separator.start() for separator in separators[1:]), len(data)]
    for number, (separator, end) in enumerate(zip(separators, ends, strict=False), 1):
        try:
            _, text = read_mail(_ESCAPED.sub(rb"\1", data[separator.end() : end]), omissions)
        except (NotConverted, RecursionError):
            omissions.add("mail cannot be read", f"mail {number}", plural="mails cannot be read")
        else:
            yield text, Mark(0, f"mail {number}")


class _Mail:
    def __init__(self, omissions: Omissions) -> None:
        self._omissions = omissions
        self._num_parts = 0
        self._has_text = False

    def text_of(self, message: Message, depth: int) -> str:
        """Return headers and text of a message, and the names of its attachments. depth: 0 for the file's own
        message."""
        subject = header_text(message, "Subject")
        title = f"# {subject}" if not depth else f"## Forwarded message: {subject}".strip()
        attached = list[str]()
        texts = [text.strip("\n") for text in self._texts(message, depth, attached)]
        lines = [title, ""] if subject or depth else []
        lines += header_lines(message, self._omissions)
        lines += [f"Attached: {', '.join(attached)}"] if attached else []
        return "\n\n".join(("\n".join(lines), *filter(None, texts))).strip("\n")

    def _texts(self, part: Message, depth: int, attached: list[str]) -> Iterator[str]:
        """Yield the texts of a part, in order. attached: receives the names of attachments."""
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS or depth > _DEEPEST:
            self._omissions.say(f"parts after the {_MOST_PARTS:,}th, or nested more than {_DEEPEST} deep")
            return
        kind, content = part.get_content_type(), part.get_payload()
        inner = [item for item in content if isinstance(item, Message)] if isinstance(content, list) else []
        if kind == "multipart/encrypted":
            self._omissions.say("its text is encrypted")
        elif kind == "message/delivery-status":
            yield "\n\n".join(
                "\n".join(f"{name}: {unencoded(str(value))}" for name, value in item.items()) for item in inner
            )
        elif kind in ("message/rfc822", "message/global", "message/news"):
            yield from (self.text_of(item, depth + 1) for item in inner)
        elif kind == "multipart/alternative" and inner:
            yield from self._alternative(inner, depth + 1, attached)
        elif kind.startswith("multipart/") and inner:
            for item in inner:
                if kind != "multipart/related" or item.get_content_maintype() != "image":  # pictures of a page
                    yield from self._texts(item, depth + 1, attached)
        else:
            yield from self._leaf(part, kind, attached, is_whole=depth == 0)

    def _alternative(self, parts: list[Message], depth: int, attached: list[str]) -> Iterator[str]:
        """Yield the plain text, or the formatted text if that is fuller; and the events of a calendar."""
        plain, formatted, events = list[str](), list[str](), list[str]()
        for part in parts:
            kind = part.get_content_type()
            texts = plain if kind == "text/plain" else events if kind == "text/calendar" else formatted
            texts += self._texts(part, depth, attached)
        is_plain = 2 * _num_characters(plain) >= _num_characters(formatted)
        yield from (*(plain if is_plain else formatted), *events)

    def _leaf(self, part: Message, kind: str, attached: list[str], *, is_whole: bool) -> Iterator[str]:
        name = unencoded(part.get_filename() or "")
        if kind in _SILENT:
            return
        if kind in ("application/pkcs7-mime", "application/x-pkcs7-mime"):
            is_signed = part.get_param("smime-type") == "signed-data"
            self._omissions.say(f"its text is {'packed with its signature' if is_signed else 'encrypted'} (S/MIME)")
        elif kind == "application/pgp-encrypted":
            self._omissions.say("its text is encrypted (PGP)")
        elif kind in ("text/rfc822-headers", "message/rfc822-headers"):
            yield self.text_of(message_from_bytes(_payload(part), policy=MailPolicy()), _DEEPEST)
        elif kind == "application/ms-tnef" or name.lower() == "winmail.dat":
            self._omissions.say("winmail.dat, in a format of Outlook")
        elif kind == "message/partial":
            self._omissions.say("the other parts of a message sent in parts")
        elif kind.startswith(("text/", "multipart/")) and (is_whole or self._is_read(part, kind, name)):
            self._has_text = True
            yield self._text(part, kind)
        else:
            self._omissions.add("attachment", name or kind)
            attached += [name] if name else []

    def _is_read(self, part: Message, kind: str, name: str) -> bool:
        """Return whether a text belongs to the message. A file with a name, after the first text, is an attachment."""
        is_attached = part.get_content_disposition() == "attachment"
        return not is_attached and (not name or not self._has_text or kind == "text/calendar")

    def _text(self, part: Message, kind: str) -> str:
        data, charset = _payload(part), part.get_content_charset("")
        if kind.startswith("multipart/"):
            self._omissions.say("its parts cannot be separated; read as one text")
        try:
            is_page = kind == "text/html" and not charset
            content = decoded_page(data, self._omissions) if is_page else decoded_text(data, charset, self._omissions)
            content = content.replace("\r\n", "\n").replace("\r", "\n")
            if kind == "text/html":
                return html_text(content).text
        except NotConverted as no:
            self._omissions.say(f"a text of the message: {no.reason}")
            return ""
        if kind == "text/calendar":
            return events_text(content)
        if content.lstrip().startswith(_ARMOUR):
            self._omissions.say("its text is encrypted (PGP)")
            return ""
        is_flowed = str(part.get_param("format", "")).lower() == "flowed"
        return _joined_lines(content, str(part.get_param("delsp", "")).lower() == "yes") if is_flowed else content


def _payload(part: Message) -> bytes:
    data = part.get_payload(decode=True)
    return data if isinstance(data, bytes) else b""


def _num_characters(texts: list[str]) -> int:
    return sum(len(word) for text in texts for word in text.split())


def _joined_lines(text: str, delete_space: bool) -> str:
    """Join the lines of format=flowed: a line that ends in a blank goes on in the next one of the same quote depth."""
    lines, previous_quote = list[list[str]](), ""
    goes_on = False
    for line in text.split("\n"):
        quote = _QUOTE.match(line)[0]  # type: ignore[index]
        line = line[len(quote) :].removeprefix(" ")
        if not goes_on or quote != previous_quote or line == "-- ":
            lines.append([quote, " "] if quote else [])
        goes_on, previous_quote = line.endswith(" ") and line != "-- ", quote
        lines[-1].append(line[:-1] if goes_on and delete_space else line)
    return "\n".join(map("".join, lines))
