"""Decode text, and remove what is not for readers: control sequences and data."""

from __future__ import annotations

import codecs
import re

from cacheblend_documents.converted import Converted, NotConverted

_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""Byte order mark -> codec. UTF-32 comes before UTF-16, because its little-endian mark begins with that of UTF-16."""


_DATA_URI = re.compile(r"""data:([\w.+-]{1,60}\\?/[\w.+-]{1,60})((?:;[\w.+=-]{1,60}){0,6}),((?:[^\s"'()<>\\]|\\/)+)""")
"""Media type, parameters and data; JSON may escape the slashes."""
_SHORTEST_DATA = 100


def without_data_uris(text: str) -> str:
    """Shorten `data:` URIs of pictures and other base64 data to their media type: `data:image/png`."""
    return _DATA_URI.sub(_shortened_uri, text) if "data:" in text else text


def _shortened_uri(found: re.Match[str]) -> str:
    is_data = found[2].endswith(";base64") or found[1].startswith("image")
    return f"data:{found[1]}" if is_data and len(found[3]) >= _SHORTEST_DATA else found[0]


_CONTROLS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)|[!-/]*[0-~])|[^\n]\x08")
_ISO_2022 = "\x1b$"  # begins a text of Chinese, Japanese or Korean that is written in ASCII
_ARMOUR = re.compile("-----BEGIN (?!PGP SIGNED)[A-Z0-9 ]+-----")  # of base64


def without_controls(text: str) -> str:
    """Remove the control sequences of terminals, such as colours (ECMA-48), and letters that others are struck over."""
    return _CONTROLS.sub("", text) if "\x1b" in text or "\b" in text else text


RTF = b"{\\rtf"
"""Start of an RTF file."""
COMPOUND = bytes.fromhex("d0cf11e0a1b11ae1")
"""Start of old Office files, and of new ones with a password."""
OLD_OFFICE = "in an old Office format: save it as .docx, .xlsx or .pptx"


def marked_codec(data: bytes) -> str:
    """Return the codec that the byte order mark names, "" without one. The codec drops the mark."""
    return next((codec for mark, codec in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "")


def decoded(data: bytes) -> str:
    """Decode UTF-8, or the encoding of the byte order mark, convert line ends to "\\n" and remove control sequences.

    Raises NotConverted for binary data and other encodings. We do not guess: a wrong guess would be quoted as the
    document's text.
    """
    if data.startswith(RTF):
        raise NotConverted("an RTF file: rename it to .rtf", "RTF files with another name")
    if data.startswith(COMPOUND):
        raise NotConverted(OLD_OFFICE, "damaged or locked")
    codec = marked_codec(data) or "utf-8"
    charset = codec.removesuffix("-sig").upper()
    if charset == "UTF-8" and b"\0" in data:
        raise NotConverted("binary")
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        hint = "; convert it: iconv -f cp1252 -t utf-8 FILE" if charset == "UTF-8" else ""
        raise NotConverted(f"invalid {charset} at byte {error.start}{hint}", "not UTF-8") from error
    if "\0" in text:
        raise NotConverted("binary")
    if _ISO_2022 in text and text.isascii():
        raise NotConverted("not UTF-8 but ISO 2022; convert it: iconv -f iso-2022-jp -t utf-8 FILE", "not UTF-8")
    if _ARMOUR.match(text):
        raise NotConverted("a key, certificate or encrypted message", "keys and encrypted messages")
    return without_data_uris(without_controls(text).replace("\r\n", "\n").replace("\r", "\n"))


def from_plain(data: bytes) -> Converted:
    return Converted(decoded(data))


def from_markdown(data: bytes) -> Converted:
    return Converted(decoded(data), "markdown")


def from_rst(data: bytes) -> Converted:
    return Converted(decoded(data), "rst")


def from_code(data: bytes) -> Converted:
    return Converted(decoded(data), "code")
