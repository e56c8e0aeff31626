"""E-mails as mail programs write them."""

from __future__ import annotations

HEADERS = "From: Mara <mara@example.org>\nTo: Jon <jon@example.org>\nSubject: Contract\nDate: Mon, 2 Mar 2026 10:00:00 +0100\n"
"""The headers of the mails, without those of MIME."""


def part(text: str, kind: str = "text/plain; charset=utf-8", *headers: str) -> str:
    return "\n".join((f"Content-Type: {kind}", *headers, "", text, ""))


def multipart(kind: str, *parts: str, boundary: str = "b1") -> str:
    """A part of parts. Parts within parts need boundaries of their own."""
    joined = "".join(f"--{boundary}\n{part}" for part in parts)
    return f"Content-Type: multipart/{kind}; boundary={boundary}\n\nThis is MIME.\n\n{joined}--{boundary}--\n"


def mail(content: str) -> bytes:
    return (HEADERS + "MIME-Version: 1.0\n" + content).encode()


CALENDAR = """BEGIN:VCALENDAR
METHOD:REQUEST
BEGIN:VTIMEZONE
BEGIN:STANDARD
DTSTART:19701025T030000
END:STANDARD
END:VTIMEZONE
BEGIN:VEVENT
DESCRIPTION:Soup\\, then\\ncake. It is a long
  text.
DTSTART;TZID="Europe/Oslo":20260302T110000
DTEND;VALUE=DATE:20260303
SUMMARY:Team lunch
ORGANIZER;CN="Lind: Mara":mailto:mara@example.org
ATTENDEE:MAILTO:jon@example.org
LOCATION:Canteen B
BEGIN:VALARM
DESCRIPTION:Reminder
END:VALARM
END:VEVENT
END:VCALENDAR
"""
