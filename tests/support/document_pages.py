"""Reference text of HTML pages, by the parser of the standard library."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_NOT_TEXT = frozenset(
    "aside button canvas dialog footer head iframe math menu nav noscript object script select style svg template textarea".split()
)
_NOT_TEXT_ROLES = frozenset(("navigation", "banner", "contentinfo", "search"))
_INLINE = frozenset(
    "a abbr b bdi bdo big cite code del dfn em font i ins kbd mark q s samp small span strike strong sub sup tt u var wbr".split()
)


def page_text(page: str) -> str:
    """Return the text of a page without navigation, scripts and controls; of its <main> alone if there is one."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    main = "".join(parser.main_texts)
    return main if main.strip() else "".join(parser.texts)


def decoded_page(data: bytes) -> str:
    """Decode UTF-16 with a byte order mark, UTF-8, the declared charset or cp1252."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    declared = re.search(rb"""(?:charset|encoding)=["']?\s*([\w-]+)""", data[:20000])
    for charset in ("utf-8-sig", declared[1].decode() if declared else "cp1252"):
        try:
            return data.decode(charset)
        except (UnicodeDecodeError, LookupError):
            continue
    return data.decode("cp1252", "replace")


class _Page(HTMLParser):
    """Collects text. An element without text to read is skipped to its end tag."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts, self.main_texts = list[str](), list[str]()
        self._skipped, self._skipped_depth, self._main_depth = "", 0, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "body":  # the head needs no end tag
            self._skipped = ""
        if self._skipped:
            self._skipped_depth += tag == self._skipped
        elif tag not in _VOID and (
            tag in _NOT_TEXT or attributes.get("role") in _NOT_TEXT_ROLES or "hidden" in attributes
        ):
            self._skipped, self._skipped_depth = tag, 1
        elif tag == "main":
            self._main_depth += 1
        self._end_word(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._skipped:
            self._skipped_depth -= 1
            if not self._skipped_depth:
                self._skipped = ""
        elif tag == "main":
            self._main_depth -= 1
        self._end_word(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_word(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.texts.append(data)
            if self._main_depth > 0:
                self.main_texts.append(data)

    def _end_word(self, tag: str) -> None:
        if tag not in _INLINE:
            self.handle_data("\n")
