"""HTML to Markdown: the main text of a page, without menus, headers, footers and scripts.

selectolax is the parser. The main text is the <main> or <article> if it has at least 30% of the page's text, else the
body. Elements such as <nav> and <footer> are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from selectolax.lexbor import LexborNode

from cacheblend_documents.charsets import decoded_page
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.limited_process import MIB, limited_step
from cacheblend_documents.omissions import Omissions
from cacheblend_documents.web.markdown import markdown_of

_NOT_TEXT = [
    "script", "style", "noscript", "template", "svg", "canvas", "iframe", "object", "video", "audio", "nav", "aside", "dialog", "menu",
    "search",
]  # fmt: skip
_AROUND = (
    "body > header, body > footer, body > form > header, body > form > footer, [role=navigation], [role=banner], "
    "[role=contentinfo], [role=search], [hidden], a.headerlink, option:not([selected]), td.linenos, .katex-html"
)
_MAIN = "main, [role=main], article"
_ENOUGH = 0.3  # minimum share of the page's text in a main part
_PARSER_S, _PARSER_S_PER_MIB = 2.0, 1.0
"""CPU time of the parser. It takes .02 s per MiB, but the square of the size for hostile nesting and attributes."""
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_SELF_CLOSING = re.compile(r"<([A-Za-z][\w:-]*)(\s[^<>]*)?/>")
_XHTML = re.compile(r"""\s*<\?xml\s|[^<]*(?:<![^<>]*>[^<]*)?<html\s[^<>]*xmlns\s*=""", re.IGNORECASE)


def from_html(data: bytes) -> Converted:
    converted = html_text(decoded_page(data, omissions := Omissions()))
    return replace(converted, omissions=tuple(omissions))


def html_text(page: str, *, xhtml: bool = False) -> Converted:
    """Convert the main text of a page to Markdown, with the title of the page.

    xhtml: elements can close themselves, as in <title/>; by default if the page says that it is XHTML.
    """
    from selectolax.lexbor import LexborHTMLParser

    page = _closed(page) if xhtml or _XHTML.match(page) else page
    with limited_step(_PARSER_S + _PARSER_S_PER_MIB * len(page) / MIB):
        tree = LexborHTMLParser(page)
    body = tree.body
    if body is None:
        raise NotConverted("empty")
    named = tree.css_first("title")
    title = " ".join(named.text().split()) if named is not None else ""
    tree.strip_tags(_NOT_TEXT)
    for node in list(_outermost(tree.css(_AROUND))):  # a node within a removed one is gone already
        node.decompose()
    num_characters = len(body.text(separator=" "))
    mains = [(len(node.text(separator=" ")), node) for node in _outermost(tree.css(_MAIN))]
    longest, main = max(mains, key=lambda main: main[0], default=(0, body))
    markdown = markdown_of(main if longest >= _ENOUGH * num_characters else body, num_characters)
    lines = (line.rstrip(" \t") for line in re.sub(r"\n{3,}", "\n\n", markdown).split("\n"))
    text = "\n".join(lines).strip("\n")
    return Converted(text + "\n", "markdown", keeps_lines=False, title=title)


def _closed(page: str) -> str:
    """Give elements that close themselves an end tag: to a parser of HTML, <title/> begins a title."""
    return _SELF_CLOSING.sub(
        lambda tag: tag[0] if tag[1].lower() in _VOID else f"<{tag[1]}{tag[2] or ''}></{tag[1]}>", page
    )


def _outermost(nodes: Iterable[LexborNode]) -> Iterator[LexborNode]:
    """Yield the nodes outside of the others. nodes: in document order."""
    is_inside = dict[int, bool]()  # id of a node -> whether it is one of the nodes, or within one
    for node in nodes:
        path, parent = [node.mem_id], node.parent
        while parent is not None and parent.mem_id not in is_inside:
            path.append(parent.mem_id)
            parent = parent.parent
        inside = parent is not None and is_inside[parent.mem_id]
        is_inside |= dict.fromkeys(path, inside)
        if not inside:
            is_inside[node.mem_id] = True
            yield node
