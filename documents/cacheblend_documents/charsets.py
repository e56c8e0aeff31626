"""Decode pages, chapters and parts of e-mails: by byte order mark, as UTF-8, or by the declared charset."""

from __future__ import annotations

import codecs
import re

from cacheblend_documents.converted import NotConverted
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.plain_text import marked_codec

_UNMARKED_UTF16 = {b"<\0": "utf-16-le", b"\0<": "utf-16-be"}
_CODECS = {
    **dict.fromkeys(("ascii", "us-ascii", "ansi_x3.4-1968", "iso-8859-1", "iso8859-1", "iso_8859-1", "latin1", "latin-1"), "cp1252"),
    **dict.fromkeys(("iso-8859-9", "iso8859-9", "latin5"), "cp1254"),
    **dict.fromkeys(("iso-8859-11", "tis-620", "windows-874"), "cp874"),
    **dict.fromkeys(("gb2312", "gb_2312-80", "gbk", "x-gbk", "gb18030"), "gb18030"),
    **dict.fromkeys(("big5", "big5-hkscs", "x-x-big5"), "big5hkscs"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis", "ms_kanji", "windows-31j"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987", "ks_c_5601-1989", "ksc5601", "windows-949"), "cp949"),
    **dict.fromkeys(("x-mac-roman", "macintosh", "mac"), "mac_roman"),
    **dict.fromkeys(("iso-8859-8-i", "logical"), "iso-8859-8"),
    **dict.fromkeys(("unicode", "utf-16", "utf-16le", "utf-16be", "utf8mb4", "unicode-1-1-utf-8"), "utf-8"),
}  # fmt: skip
"""Declared charset -> codec, where browsers differ from Python: a page that declares UTF-16 in ASCII is not UTF-16."""
_HEAD = 1 << 16  # bytes in which to look for the declaration
_META = re.compile(rb"""<meta\s[^<>]*charset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
_XML = re.compile(rb"""\s*<\?xml\s[^<>]*encoding\s*=\s*["']([\w.:-]+)""", re.IGNORECASE)
_COMMENT = re.compile(rb"<!(?=--).*?(?:-->|\Z)", re.DOTALL)
_TAGS = re.compile(r"<[^<>]*>")
_WORDS = re.compile(r"[^\W\d_]+")
_SYMBOL_IN_WORD = re.compile("[a-z][\xa1-\xaa\xac-\xb4\xb8-\xba\xbc-\xbf\xd7\xf7][a-z]")
_MOST_ACCENTED = 0.5  # maximum share of letters beyond ASCII in the words that have such letters
_ASCII_ONLY = ("iso2022", "hz", "utf-7")  # codecs that write all characters in ASCII


def codec_of(charset: str) -> str | None:
    """Return Python's codec for a declared charset, as browsers understand it; None for an unknown charset."""
    charset = charset.strip().lower()
    try:
        codec = codecs.lookup(_CODECS.get(charset, charset))
    except (LookupError, ValueError):
        return None
    return codec.name if codec._is_text_encoding else None


def decoded_page(data: bytes, omissions: Omissions) -> str:
    """Decode HTML or XML: byte order mark, UTF-8, then the declared charset. Raises NotConverted for others."""
    if codec := marked_codec(data) or _UNMARKED_UTF16.get(data[:2], ""):
        return data.decode(codec, "replace")
    return decoded_text(data, _declared(data), omissions)


def decoded_text(data: bytes, charset: str, omissions: Omissions) -> str:
    """Decode as UTF-8, else by the declared charset ("" for none), else as windows-1252 if that is plausible.

    Each assumption becomes an omission. Raises NotConverted for undeclared encodings other than windows-1252.
    """
    codec = codec_of(charset) if charset else None
    if charset.lower().startswith(("utf-16", "utf-32")) and b"\0" in data:
        return data.decode(charset, "replace")
    if codec is not None and codec.startswith(_ASCII_ONLY) and data.isascii():
        return _lossy(data, codec, charset, omissions)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at, damaged = error.start, data.decode("utf-8", "replace")
    if codec is not None and (codec != "utf-8" or _is_mostly_valid(damaged)):
        return _lossy(data, codec, charset, omissions)
    if not _is_windows_1252(data):
        declared = f"is not {charset}, which it declares" if charset else "declares no charset"
        reason = f"invalid UTF-8 at byte {at}, and {declared}; convert it: iconv -f CHARSET -t utf-8"
        raise NotConverted(reason, "not UTF-8")
    declared = f"is not {charset}, which it declares" if charset else "is not declared"
    omissions.say(f"its encoding {declared}; read as windows-1252")
    return data.decode("cp1252")


def _declared(data: bytes) -> str:
    """Return the charset that a page declares, outside of comments."""
    head = _COMMENT.sub(b" ", data[:_HEAD])
    found = _XML.match(head) or _META.search(head)
    return found[1].decode() if found else ""


def _lossy(data: bytes, codec: str, charset: str, omissions: Omissions) -> str:
    text = data.decode(codec, "replace")
    if lost := text.count("\ufffd"):
        characters = f"{lost:,} characters are" if lost > 1 else "1 character is"
        omissions.say(f"{characters} invalid in its charset, {charset}")
    return text


def _is_mostly_valid(text: str) -> bool:
    """Return whether text decoded as UTF-8 has more characters beyond ASCII than invalid bytes."""
    return sum(map("\x7f".__lt__, text)) > 2 * text.count("\ufffd")


def _is_windows_1252(data: bytes) -> bool:
    """Return whether data can be text of a Western European language in windows-1252.

    Its words have few letters beyond ASCII, no symbols, and none of the five bytes without a character. Cyrillic, Greek
    and East Asian text read as windows-1252 has words of such letters alone.
    """
    try:
        text = _TAGS.sub(" ", data.decode("cp1252"))
    except UnicodeDecodeError:
        return False
    if "\0" in text or _SYMBOL_IN_WORD.search(text):
        return False
    accented = "".join(word for word in _WORDS.findall(text) if not word.isascii())
    return sum(map("\x7f".__lt__, accented)) <= _MOST_ACCENTED * len(accented)
