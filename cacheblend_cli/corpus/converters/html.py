"""HTML to Markdown: the main text of a page, without menus, headers, footers and scripts.

selectolax is the parser. The main text is the <main> or <article> if it has at least 30% of the page's text, else the
body. Elements such as <nav> and <footer> are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.layout import Converted, TextLayout

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_NOT_TEXT = [
    "script", "style", "noscript", "template", "svg", "canvas", "iframe", "object", "form", "button", "select", "input", "nav", "aside",
    "dialog", "menu",
]  # fmt: skip
_AROUND = "body > header, body > footer, [role=navigation], [role=banner], [role=contentinfo], [role=search], [hidden], a.headerlink"
_MAIN = "main, [role=main], article"
_ENOUGH = 0.3  # minimum share of the page's text in a main part
_MOST_MAINS = 1000  # main parts to compare
_BLOCKS = frozenset(
    "address article blockquote body center dd details div dl dt fieldset figcaption figure footer h1 h2 h3 h4 h5 h6 header hgroup hr html "
    "li main ol p pre section summary table tbody td tfoot th thead tr ul".split()
)
_CHARSET = re.compile(rb"""charset=["']?([\w-]+)""", re.IGNORECASE)
_DEEPEST = 200  # maximum nesting of elements


def from_html(data: bytes) -> Converted:
    return html_text(_decoded(data))


def html_text(page: str) -> Converted:
    """Convert the main text of a page to Markdown, with the title of the page."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(page)
    body = tree.body
    if body is None:
        raise NoDocument("empty")
    named = tree.css_first("title")
    title = " ".join(named.text().split()) if named is not None else ""
    tree.strip_tags(_NOT_TEXT)
    for node in tree.css(_AROUND):
        node.decompose()
    whole = len(body.text(separator=" "))
    mains = [node for node in tree.css(_MAIN)[:_MOST_MAINS] if len(node.text(separator=" ")) >= _ENOUGH * whole]
    blocks = "".join(_blocks(max(mains, key=lambda node: len(node.text()), default=body), 0))
    lines = (line.rstrip(" \t") for line in re.sub(r"\n{3,}", "\n\n", blocks).split("\n"))
    text = "\n".join(lines).strip("\n")
    return Converted(text + "\n", TextLayout("markdown", numbered=False, title=title))


def _decoded(data: bytes) -> str:
    """Decode by byte order mark, else as UTF-8, else by the declared charset, else as cp1252 like browsers."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        named = _CHARSET.search(data[:2048])
        try:
            return data.decode(named[1].decode() if named else "cp1252", "replace")
        except LookupError:
            return data.decode("cp1252", "replace")


def _blocks(node: LexborNode, depth: int) -> Iterator[str]:
    """Convert an element's content to Markdown; blocks end with an empty line."""
    inline: list[str] = []
    for child in node.iter(include_text=True):
        tag = child.tag or ""
        if tag == "br":
            inline.append("\n")
        elif tag in _BLOCKS or (depth < _DEEPEST and any((inner.tag or "") in _BLOCKS for inner in child.css("*"))):
            yield _inline(inline)
            inline = []
            yield from _block(child, tag, depth + 1)
        else:
            inline.append(child.text(deep=True) if tag == "-text" else _spans(child, tag))
    yield _inline(inline)


def _block(node: LexborNode, tag: str, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        yield _inline([node.text(separator=" ")])
    elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
        title = " ".join(node.text().split())
        yield f"{'#' * int(tag[1])} {title}\n\n" if title else ""
    elif tag == "pre":
        code = node.text().strip("\n")
        fence = "```" if "```" not in code else "~~~~"
        yield f"{fence}\n{code}\n{fence}\n\n" if code.strip() else ""
    elif tag == "table":
        yield from _rows(node)
    elif tag == "li":
        item = "".join(_blocks(node, depth)).strip("\n")
        yield "- " + re.sub(r"\n+", "\n  ", item) + "\n" if item.strip() else ""
    elif tag in ("ul", "ol"):
        yield from _blocks(node, depth)
        yield "\n"
    else:
        yield from _blocks(node, depth)


def _rows(table: LexborNode) -> Iterator[str]:
    """Yield one line per row of the table. A table inside a cell becomes part of the cell's text."""
    for part in table.iter():
        for row in [part] if part.tag == "tr" else part.iter():
            cells = [" ".join(cell.text(separator=" ").split()) for cell in row.iter() if cell.tag in ("td", "th")]
            if any(cells):
                yield " | ".join(cells) + "\n"
    yield "\n"


def _spans(node: LexborNode, tag: str) -> str:
    text = node.text()
    return f"`{text}`" if tag in ("code", "kbd", "samp") and text.strip() and "`" not in text else text


def _inline(parts: list[str]) -> str:
    """Join inline parts. Line ends of the source become blanks; only the part "\\n" (<br>) ends a line."""
    joined = "".join("\0" if part == "\n" else part.replace("\n", " ").replace("\0", " ") for part in parts)
    text = "\n".join(" ".join(line.split()) for line in joined.split("\0")).strip("\n")
    return text + "\n\n" if text.strip() else ""
