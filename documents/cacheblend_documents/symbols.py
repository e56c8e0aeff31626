"""Characters of symbol fonts, which files store as codes of the font or as private characters."""

from __future__ import annotations

import re

_SYMBOL = {
    0x21: "!∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼",  # noqa: RUF001
    0xA0: "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…|—↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊⟨®©™∑",  # noqa: RUF001
    0xF1: "⟩∫",
}
_WINGDINGS = {
    0x28: "☎", 0x2A: "✉", 0x46: "☞", 0x4A: "☺😐☹", 0x6C: "●", 0x6E: "■☐", 0x71: "☐☐", 0x78: "☒",
    0x80: "⓪①②③④⑤⑥⑦⑧⑨⑩⓿❶❷❸❹❺❻❼❽❾❿", 0x9F: "•", 0xA7: "▪☐", 0xD8: "➢", 0xDF: "←→↑↓", 0xE8: "→", 0xFB: "✗✓☒☑",
}  # fmt: skip
_WINGDINGS_2 = {0x4F: "✗✓☒☑☒☒", 0x69: "⓪①②③④⑤⑥⑦⑧⑨⑩", 0xA3: "☐"}
_WEBDINGS = {0x61: "✓", 0x63: "☐", 0x72: "✗"}
_FONTS = {
    font: {first + n: character for first, characters in ranges.items() for n, character in enumerate(characters)}
    for font, ranges in {
        "symbol": _SYMBOL, "wingdings": _WINGDINGS, "wingdings 2": _WINGDINGS_2, "webdings": _WEBDINGS
    }.items()
}  # fmt: skip
MARKS = frozenset("☐☒☑✓✗")
"""Check boxes and check marks."""
BULLETS = dict.fromkeys((0xF06E, 0xF076, 0xF0A7, 0xF0A8, 0xF0B7, 0xF0D8), "•")
"""Private characters of Symbol and Wingdings that start the items of lists, where the font is unknown."""
_PRIVATE = re.compile("[\uf020-\uf0ff]")


def symbol(font: str, code: int) -> str:
    """Return the character for a code of a font; "" for decorations without a meaning."""
    known = _FONTS.get(font.lower())
    if known is None and not 0xF000 <= code <= 0xF0FF:
        return chr(code) if 0x20 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else ""
    return (known or _FONTS["symbol"]).get(code & 0xFF, "")


def without_font_codes(text: str, font: str) -> str:
    """Replace the codes of symbol fonts in a text."""
    if font.lower() in ("wingdings", "wingdings 2", "wingdings 3", "webdings"):
        return "".join(c if c.isspace() else symbol(font, ord(c)) if ord(c) < 0xF100 else c for c in text)
    return _PRIVATE.sub(lambda found: symbol(font, ord(found[0])), text)
