"""MathML to linear text in the style of LaTeX."""

from __future__ import annotations

import re

from selectolax.lexbor import LexborNode

_SCRIPTS = {"msup": "^", "mover": "^", "msub": "_", "munder": "_", "msubsup": "_^", "munderover": "_^"}
_BETWEEN = {"mtable": "; ", "mtr": " "}
_LATEX = (
    "annotation[encoding='application/x-tex'], annotation[encoding='application/x-latex'], annotation[encoding='LaTeX']"
)
_STYLE = re.compile(r"\{\\displaystyle (.*)\}", re.DOTALL)
_DEEPEST = 50  # nesting of formulas; deeper parts are written without structure
_HIDDEN = ("annotation", "annotation-xml", "mphantom")


def formula_text(math: LexborNode) -> str:
    """Return the LaTeX that a <math> element has as its alternative text or annotation, else its linear text."""
    latex = math.css_first(_LATEX)
    text = (math.attributes.get("alttext") or "").strip() or (latex.text().strip() if latex is not None else "")
    if styled := _STYLE.fullmatch(text):
        text = styled[1]
    return " ".join((text or _linear(math, 0)).split())


def _linear(node: LexborNode, depth: int) -> str:
    if depth > _DEEPEST:
        return node.text()
    parts = list[str]()
    for child in node.iter(include_text=True):
        if child.is_text_node:
            parts.append(child.text_content or "")
        elif child.tag not in _HIDDEN:
            parts.append(_linear(child, depth + 1))
    parts = [part for part in parts if part.strip()]
    elements, tag = [part.strip() for part in parts], node.tag or ""
    marks = _SCRIPTS.get(tag, "")
    if marks and len(elements) == len(marks) + 1:
        return elements[0] + "".join(map(_script, marks, elements[1:]))
    if tag in ("mfrac", "mroot") and len(elements) == 2:
        first, second = elements
        return rf"\frac{{{first}}}{{{second}}}" if tag == "mfrac" else rf"\sqrt[{second}]{{{first}}}"
    if tag == "msqrt":
        return rf"\sqrt{{{''.join(elements)}}}"
    if tag == "mfenced":
        return f"({', '.join(elements)})"
    text = _BETWEEN.get(tag, "").join(parts)
    return f" {text} " if tag == "mtext" else text


def _script(mark: str, text: str) -> str:
    return mark + (text if len(text) == 1 else f"{{{text}}}")
