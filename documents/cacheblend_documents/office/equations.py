"""Equations of Office files (Office Math Markup) as text on one line: `x = (-b ± sqrt(b^2 - 4ac))/2a`."""

from __future__ import annotations

import re
from collections.abc import Callable
from unicodedata import normalize
from xml.etree.ElementTree import Element

from cacheblend_documents.office.package import child

_DEEPEST = 50  # maximum nesting; deeper parts lose their structure
_ATOM = re.compile(r"-?\w+(?:\.\w+)?")
_STYLED = re.compile("[\U0001d400-\U0001d7ff\u2102-\u2149]")  # letters in mathematical italics, bold, ...
_ACCENTS = {
    "\u0300": "grave", "\u0301": "acute", "\u0302": "hat", "\u0303": "tilde", "\u0304": "bar", "\u0305": "bar",
    "\u0306": "breve", "\u0307": "dot", "\u0308": "ddot", "\u030c": "check", "\u20d7": "vec", "\u2192": "vec", "\u203e": "bar", "\u00af": "bar",
}  # fmt: skip
_BRACES = ("", "\u23de", "\u23df", "\u23b4", "\u23b5")  # above or below a group


def equation_text(element: Element) -> str:
    """Return the text of m:oMath or m:oMathPara."""
    return " ".join(_text(element, 0).split())


def _text(element: Element, depth: int) -> str:
    if depth > _DEEPEST:
        return "".join(inner.text or "" for inner in element.iter("m:t"))
    form = _FORMS.get(element.tag)
    if form is not None:
        return form(element, depth + 1)
    return "".join(_text(inner, depth + 1) for inner in element if not inner.tag.endswith("Pr"))


def _part(element: Element, name: str, depth: int) -> str:
    found = child(element, name)
    return "" if found is None else _text(found, depth).strip()


def _value(element: Element, properties: str, name: str, default: str) -> str:
    """Return a property, such as "m:begChr" in "m:dPr". An element without a value stands for an empty one."""
    found = child(element, properties, name)
    return default if found is None else found.get("val", "")


def _is_wrapped(text: str) -> bool:
    """Return whether a pair of brackets is around the whole text."""
    if not (text.startswith("(") and text.endswith(")")):
        return False
    depth = 0
    for n, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return n == len(text) - 1
    return False


def _grouped(text: str) -> str:
    return text if len(text) < 2 or _ATOM.fullmatch(text) or _is_wrapped(text) else f"({text})"


def _called(name: str, text: str) -> str:
    return name + text if _is_wrapped(text) else f"{name}({text})"


def _run(element: Element, depth: int) -> str:
    return _STYLED.sub(lambda found: normalize("NFKC", found[0]), element.text or "")


def _fraction(element: Element, depth: int) -> str:
    top, bottom = _part(element, "m:num", depth), _part(element, "m:den", depth)
    if _value(element, "m:fPr", "m:type", "bar") == "noBar":
        return f"{top} choose {bottom}"
    return f"{_grouped(top)}/{_grouped(bottom)}"


def _limits(element: Element, depth: int) -> str:
    below, above = _part(element, "m:sub", depth), _part(element, "m:sup", depth)
    return (f"_{_grouped(below)}" if below else "") + (f"^{_grouped(above)}" if above else "")


def _script(element: Element, depth: int) -> str:
    return _grouped(_part(element, "m:e", depth)) + _limits(element, depth)


def _before(element: Element, depth: int) -> str:
    return f"{_limits(element, depth)} {_part(element, 'm:e', depth)}"


def _limit(element: Element, depth: int) -> str:
    base, limit = _grouped(_part(element, "m:e", depth)), _part(element, "m:lim", depth)
    if limit in _BRACES:
        return base
    return f"{base}{'_' if element.tag == 'm:limLow' else '^'}{_grouped(limit)}"


def _nary(element: Element, depth: int) -> str:
    return _value(element, "m:naryPr", "m:chr", "\u222b") + _before(element, depth)


def _root(element: Element, depth: int) -> str:
    degree = _part(element, "m:deg", depth)
    return _called(f"root_{_grouped(degree)}" if degree else "sqrt", _part(element, "m:e", depth))


def _function(element: Element, depth: int) -> str:
    name, text = _part(element, "m:fName", depth), _part(element, "m:e", depth)
    return _called(name, text) if name.isalnum() else f"{name} {text}"


def _delimited(element: Element, depth: int) -> str:
    first, last = _value(element, "m:dPr", "m:begChr", "("), _value(element, "m:dPr", "m:endChr", ")")
    parts = [_text(inner, depth).strip() for inner in element.findall("m:e")]
    inner = _value(element, "m:dPr", "m:sepChr", "|").join(parts)
    is_matrix = len(parts) == 1 and [found.tag for found in child(element, "m:e") or ()] == ["m:m"]
    return first + (inner[1:-1] if is_matrix else inner) + last


def _matrix(element: Element, depth: int) -> str:
    rows = (", ".join(_text(cell, depth).strip() for cell in row.findall("m:e")) for row in element.findall("m:mr"))
    return f"[{'; '.join(rows)}]"


def _lines(element: Element, depth: int) -> str:
    return "; ".join(_text(inner, depth).replace("&", "").strip() for inner in element.findall("m:e"))


def _equations(element: Element, depth: int) -> str:
    return "; ".join(_text(inner, depth) for inner in element.findall("m:oMath"))


def _accented(element: Element, depth: int) -> str:
    sign, text = _value(element, "m:accPr", "m:chr", "\u0302"), _part(element, "m:e", depth)
    return _called(_ACCENTS[sign], text) if sign in _ACCENTS else text + sign


def _barred(element: Element, depth: int) -> str:
    name = "bar" if _value(element, "m:barPr", "m:pos", "bot") == "top" else "underline"
    return _called(name, _part(element, "m:e", depth))


_FORMS: dict[str, Callable[[Element, int], str]] = {
    **dict.fromkeys(("m:t", "w:t"), _run),
    "m:f": _fraction,
    **dict.fromkeys(("m:sSup", "m:sSub", "m:sSubSup"), _script),
    "m:sPre": _before,
    **dict.fromkeys(("m:limLow", "m:limUpp"), _limit),
    "m:nary": _nary,
    "m:rad": _root,
    "m:func": _function,
    "m:d": _delimited,
    "m:m": _matrix,
    "m:eqArr": _lines,
    "m:oMathPara": _equations,
    "m:acc": _accented,
    "m:bar": _barred,
    **dict.fromkeys(("w:del", "w:moveFrom"), lambda element, depth: ""),
}
