"""Probes of a model's tokenizer and chat template: with document text, and at the end of a turn."""

from __future__ import annotations

from datetime import datetime

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.tokenizer import Tokenizer

_ASKED, _ANSWERED, _NEXT = "5d1f0 asked", "5d1f1 answered", "5d1f2 next"
SAMPLES = {
    "line breaks": "First line.\nSecond line.\n\n\nA new section.\n",
    "indentation": "def f(x):\n    if x:\n\t\treturn [\n            x,\n        ]\n",
    "tables": "| name  | price |\n|-------|------:|\n| Koven |  12.50 |\na\tb\t\tc\n",
    "markup": '<p class="x">1 < 2 &amp; <b>bold</b></p>\n<table><tr><td>[1]</td></tr></table>\n**bold** `code`\n',
    "marks of other prompts": "<s>[INST] <<SYS>> <|im_start|>user <|eot_id|> <start_of_turn> <think></think> [PAD]\n",
    "other scripts": "Caf\u00e9, stra\u00dfe, \u043f\u0440\u0438\u0432\u0435\u0442, \u65e5\u672c\u8a9e, \U0001f600\n",
}
"""Sample texts by kind of content."""


def text_check(tokenizer: Tokenizer) -> str:
    """Describe how document text is encoded: all kept, or the kinds of text that are refused or changed."""
    found = [f"{name}: {fault}" for name, text in SAMPLES.items() if (fault := _fault(tokenizer, text))]
    return "; ".join(found) or f"kept as written: {', '.join(SAMPLES)}"


def _fault(tokenizer: Tokenizer, text: str) -> str:
    """Return why the text is not kept as written, or ""."""
    try:
        ids = tokenizer.encode_text(text)
    except UsageError as error:
        return f"refused, {error.message}"
    kept = tokenizer.decode(ids, skip_special_tokens=False)
    if kept.strip() == text.strip():
        return ""
    at = next((i for i, (a, b) in enumerate(zip(text, kept, strict=False)) if a != b), min(len(text), len(kept)))
    return f"changed, {text[at : at + 12]!r} is read as {kept[at : at + 12]!r}"


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the control token that the chat template puts directly after a model's message; None if there is none, or
    no template. Not for gpt-oss: its `<|end|>` ends a channel, and the answer follows in the next one."""
    if not tokenizer.has_template or tokenizer.knows("<|channel|>"):
        return None
    texts = {"user": _ASKED, "assistant": _ANSWERED}
    messages = [{"role": role, "content": text} for role, text in texts.items()] + [{"role": "user", "content": _NEXT}]
    try:
        rendered = tokenizer.render(messages, datetime.now(), {}).text
    except UsageError:
        return None
    behind = rendered.partition(_ANSWERED)[2].partition(_NEXT)[0]
    first = next(iter(tokenizer.encode_template_rest(behind.lstrip())), None)
    return first if first in tokenizer.control_ids else None
