"""Equations of Office files (Office Math Markup) and web pages (MathML) on one line: `x = (-b+sqrt(d))/(2a)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import normalize
from xml.etree.ElementTree import Element

from selectolax.lexbor import LexborNode

_DEEPEST = 50  # nesting; deeper parts lose their structure
_WHOLE = re.compile(r"-?\w+(?:\.\w+)?|\w*(?:\[\w*\])?\([^()]*\)")  # a number, a name, "(a+b)", "sqrt(x)"
_STYLED = re.compile("[\U0001d400-\U0001d7ff\u2102-\u2149]")  # letters in mathematical italics, bold, ...
_SIGNS = {
    **dict.fromkeys(("m:f", "mfrac"), "/"),
    **dict.fromkeys(("m:sSup", "m:limUpp", "msup", "mover"), "^"),
    **dict.fromkeys(("m:sSub", "m:limLow", "msub", "munder"), "_"),
    **dict.fromkeys(("m:sSubSup", "msubsup", "munderover"), "_^"),
}
"""Form -> the signs between its parts."""
_BETWEEN = {
    **dict.fromkeys(("m:mr", "mtr"), ", "),
    **dict.fromkeys(("m:m", "m:eqArr", "m:oMathPara", "mtable"), "; "),
}
"""Form of any number of parts -> what separates them."""
_ACCENTS = {"m:acc": "\u0302", "m:bar": "\u0305"}
_LATEX = (
    "annotation[encoding='application/x-tex'], annotation[encoding='application/x-latex'], annotation[encoding='LaTeX']"
)
_DISPLAYED = re.compile(r"\{\\displaystyle (.*)\}", re.DOTALL)
_UNSEEN = ("w:del", "w:moveFrom", "annotation", "annotation-xml", "mphantom")


def equation_text(element: Element) -> str:
    """Return the text of m:oMath or m:oMathPara."""
    return " ".join(_office(element, 0).split())


def formula_text(math: LexborNode) -> str:
    """Return the LaTeX that a <math> element has as its alternative text or annotation, else its text."""
    latex = math.css_first(_LATEX)
    text = (math.attributes.get("alttext") or "").strip() or (latex.text().strip() if latex is not None else "")
    if displayed := _DISPLAYED.fullmatch(text):
        text = displayed[1]
    return " ".join((text or _web(math, 0)).split())


def _office(element: Element, depth: int) -> str:
    tag = element.tag
    if tag in ("m:t", "w:t") or depth > _DEEPEST:
        text = "".join(inner.text or "" for inner in element.iter() if inner.tag in ("m:t", "w:t"))
        return _STYLED.sub(lambda found: normalize("NFKC", found[0]), text)
    parts = [
        _office(inner, depth + 1) for inner in element if not inner.tag.endswith("Pr") and inner.tag not in _UNSEEN
    ]
    properties = element.find(f"{tag}Pr")
    values = {} if properties is None else {inner.tag: inner.get("val", "") for inner in properties}
    if tag == "m:d":
        inner = values.get("m:sepChr", "|").join(parts)
        return f"{values.get('m:begChr', '(')}{inner}{values.get('m:endChr', ')')}"
    if tag == "m:nary" and len(parts) == 3:
        return f"{values.get('m:chr', chr(0x222B))}{_scripts('', '_^', parts[:2])} {parts[2]}"
    if tag == "m:rad":
        return _root(parts[-1], parts[0] if len(parts) > 1 else "")
    if tag in _ACCENTS:
        return "".join(parts) + values.get("m:chr", _ACCENTS[tag])
    if tag == "m:func" or values.get("m:type") == "noBar":
        return (" choose " if tag == "m:f" else " ").join(parts)
    if tag == "m:eqArr":  # aligned at "&"
        parts = [part.replace("&", "") for part in parts]
    return _joined(tag, parts)


def _web(node: LexborNode, depth: int) -> str:
    if depth > _DEEPEST:
        return node.text()
    parts, tag = list[str](), node.tag or ""
    for child in node.iter(include_text=True):
        if child.tag not in _UNSEEN:
            parts.append((child.text_content or "") if child.is_text_node else _web(child, depth + 1))
    parts = [part for part in parts if part.strip()]
    if tag == "msqrt":
        return _root("".join(parts))
    if tag == "mroot" and len(parts) == 2:
        return _root(*parts)
    if tag == "mfenced":
        return f"({', '.join(parts)})"
    return f" {''.join(parts)} " if tag == "mtext" else _joined(tag, parts)


def _joined(tag: str, parts: Sequence[str]) -> str:
    """Return the text of a form: "a/(b+c)", "x_i^2", the rows of a matrix."""
    signs = _SIGNS.get(tag, "")
    if signs and len(parts) == len(signs) + 1:
        return _scripts(_grouped(parts[0]), signs, parts[1:])
    return _BETWEEN.get(tag, "").join(parts)


def _scripts(text: str, signs: str, parts: Sequence[str]) -> str:
    return text + "".join(sign + _grouped(part) for sign, part in zip(signs, parts, strict=True) if part.strip())


def _root(text: str, degree: str = "") -> str:
    return f"sqrt{f'[{degree}]' * bool(degree.strip())}({text})"


def _grouped(text: str) -> str:
    """Return a part in parentheses, if it needs them."""
    text = text.strip()
    return text if len(text) < 2 or _WHOLE.fullmatch(text) else f"({text})"
