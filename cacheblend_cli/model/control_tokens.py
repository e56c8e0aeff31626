"""Tell control tokens among a tokenizer's added tokens from text that the model was trained on as one token.

Tokenizers flag both alike: Gemma lists line breaks, runs of spaces and HTML tags as added tokens that are not special,
and neither Qwen's `<tool_call>` nor DeepSeek's token for a user's turn is special. In documents a text token is matched
as the model's own tokenizer does; text never yields a control token.
"""

from __future__ import annotations

import re

_BARRED = re.compile(
    "<[|\uff5c].*>|<.*[|\uff5c]>"
)  # <|im_end|>, DeepSeek's with wide bars, Gemma 4's <|turn> and <turn|>
_BRACKETED = re.compile(r"\[[^\s\[\]]+\]")  # [INST], [/INST], [TOOL_CALLS]
_TAG = re.compile(r"</?([^\s<>/]+)/?>")  # <tool_call>, </think>, <start_of_turn>
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_HTML = frozenset(
    "a abbr address article aside audio b bdi bdo blockquote body br button canvas caption center cite code col colgroup data dd del details dfn dialog div dl dt "
    "em embed fieldset figcaption figure font footer form h1 h2 h3 h4 h5 h6 head header hr html i iframe img input ins kbd label legend li link main map mark "
    "math menu meta nav noscript object ol option p param picture pre q rp rt ruby s samp script section select small span strike strong style sub summary sup "
    "svg table tbody td template textarea tfoot th thead time title tr track tt u ul var video wbr".split()
)


def is_control(content: str, *, special: bool, template: str) -> bool:
    """Return whether an added token is a control token: it is special, has the form of one, or occurs in the chat
    template.

    White space, bytes (<0x0A>) and HTML elements do not have this form. White space is in every template and counts as
    text.
    """
    if special:
        return True
    text = content.replace("\u2581", " ")
    if not text.strip():
        return False
    return _has_form(text.strip()) or content in template


def _has_form(text: str) -> bool:
    tag = _TAG.fullmatch(text)
    if tag is not None and (tag[1].lower() in _HTML or _BYTE.fullmatch(text)):
        return False
    return any(form.fullmatch(text) for form in (_BARRED, _BRACKETED, _TAG))
