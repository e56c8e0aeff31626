"""Text of e-mails: every text part in order, forwarded messages and calendars; a word on what is left out. Mailboxes,
calendars and contacts."""

from __future__ import annotations

import pytest
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.mail.calendar_events import from_calendar
from cacheblend_documents.mail.contacts import from_contacts
from cacheblend_documents.mail.mail import from_mail, from_mailbox
from mails import CALENDAR, HEADERS, mail, multipart, part

TOP = "# Contract\n\nFrom: Mara <mara@example.org>\nTo: Jon <jon@example.org>\nDate: Mon, 2 Mar 2026 10:00:00 +0100"
PDF = part("JVBERi0xLjQK", "application/pdf; name=a.pdf", "Content-Disposition: attachment; filename=a.pdf")


def read(content: str) -> tuple[str, tuple[str, ...]]:
    """The text after the headers, and the omissions."""
    found = from_mail(mail(content))
    assert found.text.startswith(TOP + "\n")
    return found.text.removeprefix(TOP).strip("\n"), found.omissions


def test_text_after_an_attachment_is_read() -> None:
    text, omissions = read(multipart("mixed", part("See the contract:"), PDF, part("The deadline is 17 April.")))
    assert text == "Attached: a.pdf\n\nSee the contract:\n\nThe deadline is 17 April."
    assert omissions == ("1 attachment (a.pdf)",)
    named = part("1;2", "text/csv; name=b.csv"), part("b", "text/html", "Content-Disposition: attachment")
    assert read(multipart("mixed", part("Text.", "text/plain; name=text.txt"), *named)) == (
        "Attached: b.csv\n\nText.", ("2 attachments (b.csv, text/html)",),
    )  # fmt: skip
    assert read(PDF) == ("Attached: a.pdf", ("1 attachment (a.pdf)",))


def test_the_fuller_alternative_is_read() -> None:
    page = part("<p>The deposit is <b>350</b> euros.", "text/html")
    assert read(multipart("alternative", part("The deposit is 350 euros."), page))[0] == "The deposit is 350 euros."
    assert read(multipart("alternative", part("No HTML."), page))[0] == "The deposit is 350 euros."
    image = part("aaaa", "image/png; name=logo.png", "Content-ID: <logo>")
    related = multipart("related", page, image, boundary="b2")
    calendar = part(CALENDAR, "text/calendar; method=REQUEST; name=invite.ics")
    text, omissions = read(multipart("alternative", part(" "), related, calendar))
    assert text.startswith("The deposit is 350 euros.\n\nEvent: Team lunch")
    assert omissions == ()


def test_forwarded_messages_are_read_with_their_headers() -> None:
    inner = "From: s@example.net\nSubject: =?utf-8?Q?Rechnung_f=C3=BCr_M=C3=A4rz?=\n" + multipart(
        "mixed", part("It is 612 euros."), PDF, boundary="b2"
    )
    text, omissions = read(multipart("mixed", part("See below."), part(inner, "message/rfc822"), part("Bye.")))
    assert text == (
        "See below.\n\n## Forwarded message: Rechnung für März\n\nFrom: s@example.net\nAttached: a.pdf\n\nIt is 612 euros.\n\nBye."
    )
    assert omissions == ("1 attachment (a.pdf)",)


def test_delivery_reports_are_read() -> None:
    status = part(
        "Reporting-MTA: dns; a.example\n\nFinal-Recipient: rfc822; x@example.org\nStatus: 5.1.1",
        "message/delivery-status",
    )
    headers = part("Subject: Keys\nTo: x@example.org\nReceived: y\n", "text/rfc822-headers")
    text, _ = read(multipart("report", part("It was not delivered."), status, headers))
    assert (
        "It was not delivered.\n\nReporting-MTA: dns; a.example\n\nFinal-Recipient: rfc822; x@example.org\nStatus: 5.1.1"
        in text
    )
    assert text.endswith("## Forwarded message: Keys\n\nTo: x@example.org")


def test_a_boundary_with_equals_signs_and_no_quotes_separates_parts() -> None:
    assert read(multipart("mixed", part("Room 218."), boundary="----=_Part_0.E8=F2"))[0] == "Room 218."
    text, omissions = read("Content-Type: multipart/mixed; boundary=x\n\n--y\n\nRoom 218.\n")
    assert "Room 218." in text
    assert omissions == ("its parts cannot be separated; read as one text",)


def test_events_of_a_calendar_are_read() -> None:
    assert read(part(CALENDAR, "text/calendar; method=REQUEST"))[0] == (
        "Event: Team lunch\nStart: 2026-03-02 11:00 Europe/Oslo\nEnd: 2026-03-03\nLocation: Canteen B\n"
        "Organizer: Lind: Mara <mara@example.org>\nAttendee: jon@example.org\nDescription: Soup, then\ncake. It is a long text."
    )
    assert "Start: 2026-03-02 11:00 UTC" in read(part("BEGIN:VTODO\nDTSTART:20260302T110000Z\n", "text/calendar"))[0]


@pytest.mark.parametrize("before", ["\r\n", "\n\n", "From mara@example.org Mon Mar  2 10:00:00 2026\n"])
@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16"])
def test_blanks_and_marks_before_the_headers_are_ignored(before: str, codec: str) -> None:
    assert from_mail((before + HEADERS + "\nGrüße.\n").encode(codec)).text == TOP + "\n\nGrüße.\n"


def test_parts_are_decoded_by_their_charset() -> None:
    quoted = "Content-Transfer-Encoding: quoted-printable"
    assert (
        read(part("<meta charset=3Dutf-8>K=F8benhavn, 45 =80", "text/html; charset=iso-8859-1", quoted))[0]
        == "København, 45 €"
    )
    assert read(part("R3L83w==", "text/plain; charset=latin1", "Content-Transfer-Encoding: base64"))[0] == "Grüß"
    assert read(part("RwByAPwA3wA=", "text/plain; charset=utf-16le", "Content-Transfer-Encoding: base64"))[0] == "Grüß"
    assert read(part("Gr+APwA3w-", "text/plain; charset=utf-7"))[0] == "Grüß"
    text, omissions = read(part("=D1=F2=EE=E8=EC=EE=F1=F2=FC", "text/plain", quoted))
    assert (text, len(omissions)) == ("", 1)
    assert omissions[0].startswith("a text of the message: invalid UTF-8")
    raw = mail(part("x")).replace(b"Contract", "Größe".encode("cp1252"))
    assert from_mail(raw).title == "Größe"


def test_encrypted_and_foreign_parts_are_said() -> None:
    for content, omission in (
        (multipart("encrypted", part("Version: 1", "application/pgp-encrypted"), PDF), "its text is encrypted"),
        (part("MIIB", "application/pkcs7-mime; smime-type=enveloped-data"), "its text is encrypted (S/MIME)"),
        (
            part("MIIB", "application/pkcs7-mime; smime-type=signed-data"),
            "its text is packed with its signature (S/MIME)",
        ),
        (part("-----BEGIN PGP MESSAGE-----\n\nhQEMA\n"), "its text is encrypted (PGP)"),
        (multipart("mixed", part("eJ8", "application/ms-tnef")), "winmail.dat, in a format of Outlook"),
    ):
        assert read(content) == ("", (omission,))
    signed = multipart("signed", part("Agreed."), part("MIIB", "application/pkcs7-signature; name=smime.p7s"))
    assert read(signed) == ("Agreed.", ())


def test_flowed_lines_are_joined() -> None:
    flowed = "The deposit \nis 350 euros.\n> Is it \n> paid?\n>> No.\n Stuffed.\n-- \nMara\n"
    text, _ = read(part(flowed, "text/plain; format=flowed"))
    assert text == "The deposit is 350 euros.\n> Is it paid?\n>> No.\nStuffed.\n-- \nMara"
    assert read(part("Kettle \nhandle", "text/plain; format=flowed; delsp=yes"))[0] == "Kettlehandle"


def test_parts_depth_and_headers_are_bounded() -> None:
    text, omissions = read(multipart("mixed", *[part(f"Text {n}.") for n in range(1200)]))
    assert ("Text 990." in text, "Text 1100." in text) == (True, False)
    assert omissions == ("parts after the 1,000th, or nested more than 20 deep",)
    nested = part("Innermost.")
    for n in range(30):
        nested = part(f"Subject: level {n}\n{nested}", "message/rfc822")
    text, omissions = read(nested)
    assert ("level 25" in text, "level 3" in text) == (True, False)
    assert omissions == ("parts after the 1,000th, or nested more than 20 deep",)
    assert from_mail(b"From: " + b"(" * 100_000 + b"a@b.c\n\nText.").text.endswith("\n\nText.\n")
    long = from_mail(f"Subject: x\nTo: {'a@example.org, ' * 2000}\n\nText.".encode())
    assert len(long.text) < 10_000
    assert long.omissions == ("the To line after 8,000 characters",)


def test_a_file_without_headers_is_refused() -> None:
    with pytest.raises(NotConverted, match="not an e-mail"):
        from_mail(b"\n\njust text")


FIRST = mail(part("R3LDvMOfZQo=", "text/plain; charset=utf-8", "Content-Transfer-Encoding: base64"))
SECOND = mail(multipart("mixed", part("Open until 18.\n\n>From Mara on\nFrom here on, call 218."), PDF))
FROM = b"From mara@example.org Mon Mar  2 10:00:00 2026\n"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_mailbox_is_its_mails(line_end: bytes) -> None:
    data = (FROM + FIRST + b"\n" + FROM + SECOND + FROM + b"Received: x\n\n").replace(b"\n", line_end)
    found = from_mailbox(data)
    assert found.text.replace("\r", "") == (
        f"{TOP}\n\nGrüße\n\n{TOP}\nAttached: a.pdf\n\nOpen until 18.\n\nFrom Mara on\nFrom here on, call 218.\n\n"
    )
    assert [mark.part for mark in found.marks] == ["mail 1", "mail 2"]
    assert found.is_split
    assert found.omissions == ("1 attachment (a.pdf)",)


def test_what_is_not_a_mail_in_a_mailbox_is_an_omission() -> None:
    nested = b"Subject: x\n" + b"Content-Type: message/rfc822\n\n" * 2000
    found = from_mailbox(b"lost\n" + FROM + FIRST + b"\n" + FROM + nested)
    assert found.omissions == ("1 mail cannot be read (mail 2)", "the text before the first mail")
    with pytest.raises(NotConverted, match="not a mailbox"):
        from_mailbox(b"From here on, call 218.\n")


def test_a_saved_page_is_its_text_without_styles() -> None:
    parts = part("<p>Open until 18.", "text/html"), part("p { color: red }", "text/css"), part("aaaa", "image/png")
    assert read(multipart("related", *parts)) == ("Open until 18.", ())


def test_calendars_and_contacts() -> None:
    assert from_calendar(CALENDAR.encode()).text.startswith("Event: Team lunch\nStart: 2026-03-02 11:00 Europe/Oslo\n")
    cards = (
        "BEGIN:VCARD\nVERSION:2.1\nN;CHARSET=UTF-8;ENCODING=QUOTED-PRINTABLE:M=C3=BCller;J=C3=BCrgen;;;\n"
        "ADR;HOME;QUOTED-PRINTABLE:;;Stra=C3=9F=\ne 5;K=C3=B6ln\nPHOTO;ENCODING=BASE64;JPEG:/9j/4AAQ\n abc==\n\nEND:VCARD\n"
        "BEGIN:VCARD\nVERSION:4.0\nN:Byron;Ada\nFN:Ada, Countess\nitem1.EMAIL;type=WORK:ada@example.org\nTEL;VALUE=uri:tel:+1-555\n"
        "ORG:Engines\\, Ltd;Hall 3\nNOTE:Two\\nlines\\; fol\n ded\nX-ID:7\nEND:VCARD\n"
    )
    assert from_contacts(cards.encode()).text == (
        "# Jürgen Müller\n\nAddress (home): Straße 5, Köln\n\n# Ada, Countess\n\nEmail (work): ada@example.org\nPhone: +1-555\n"
        "Organization: Engines, Ltd, Hall 3\nNote: Two lines; folded\n\n"
    )
