"""E-mail: sender, recipients, date, subject and body. Attachments are listed, not read."""

from __future__ import annotations

from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default

from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.converters.html import html_text
from cacheblend_cli.corpus.layout import Converted, TextLayout

_HEADERS = ("From", "To", "Cc", "Date")


def from_mail(data: bytes) -> Converted:
    message = message_from_bytes(data, policy=default)
    assert isinstance(message, EmailMessage)  # the default policy's message class
    if not message.keys():
        raise NoDocument("not an e-mail", "broken e-mails")
    subject = " ".join(str(message["Subject"] or "").split())
    lines = [f"# {subject}", ""] if subject else []
    lines += [f"{name}: {' '.join(str(message[name]).split())}" for name in _HEADERS if message[name]]
    attached = [name for part in message.iter_attachments() if (name := part.get_filename())]
    lines += [f"Attached: {', '.join(attached)}"] if attached else []
    text = "\n".join((*lines, "", _body(message))).replace("\r\n", "\n").strip("\n") + "\n"
    return Converted(text, TextLayout("markdown", numbered=False, title=subject))


def _body(message: EmailMessage) -> str:
    part = message.get_body(("plain", "html"))
    if part is None:
        return ""
    try:
        content = str(part.get_content())
    except (LookupError, ValueError, AssertionError):  # unknown or wrong encoding
        content = (part.get_payload(decode=True) or b"").decode("utf-8", "replace")  # type: ignore[union-attr]
    return html_text(content).text if part.get_content_subtype() == "html" else content
