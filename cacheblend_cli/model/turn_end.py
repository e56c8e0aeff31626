"""The token that ends a model's message in the chat template."""

from __future__ import annotations

from datetime import datetime

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.tokenizer import Tokenizer

_ASKED, _ANSWERED, _NEXT = "5d1f0 asked", "5d1f1 answered", "5d1f2 next"


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the control token that the chat template puts directly after a model's message; None if there is none, or
    no template. Not for gpt-oss: its `<|end|>` ends a channel, and the answer follows in the next one."""
    if not tokenizer.has_template or tokenizer.knows("<|channel|>"):
        return None
    texts = {"user": _ASKED, "assistant": _ANSWERED}
    messages = [{"role": role, "content": text} for role, text in texts.items()] + [{"role": "user", "content": _NEXT}]
    try:
        rendered = tokenizer.render(messages, lambda form: datetime.now().strftime(form), {})
    except UsageError:
        return None
    behind = rendered.partition(_ANSWERED)[2].partition(_NEXT)[0]
    first = next(iter(tokenizer.encode_template_rest(behind.lstrip())), None)
    return first if first in tokenizer.control_ids else None
