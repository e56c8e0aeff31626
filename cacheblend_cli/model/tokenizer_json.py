"""Stages of a tokenizer.json, edited to encode text in the middle of a prompt, and its control tokens.

Added tokens can be control tokens, or text that the model was trained on as one token, and the flag `special` does not
tell them apart: Gemma lists line breaks, runs of spaces and HTML tags that are not special, and neither Qwen's
`<tool_call>` nor DeepSeek's token for a user's turn is special. In documents a text token is matched as the model's own
tokenizer does; text never yields a control token.
"""

from __future__ import annotations

import base64
import json
import math
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Model

MOST_GROWTH = 16
"""Limit of the factor by which normalizer and pre_tokenizer, or decoder, lengthen a text. Published ones: at most 4."""
MOST_STAGES, MOST_SPECIAL = 512, 4096
Stage = dict[str, Any]
NOTHING: Stage = {"model": {"type": "BPE", "vocab": {}, "merges": []}}
"""A tokenizer.json without a vocabulary."""


class _Model(msgspec.Struct):
    unk_token: str | None = None
    unk_id: int | None = None


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[Stage] | None = None
    normalizer: Stage | None = None
    pre_tokenizer: Stage | None = None
    post_processor: Stage | None = None
    decoder: Stage | None = None


_decode = msgspec.json.Decoder(_File).decode
_BARRED = re.compile("<[|\uff5c].*>|<.*[|\uff5c]>")  # <|im_end|>, also with wide bars, Gemma 4's <|turn> and <turn|>
_BRACKETED = re.compile(r"\[[^\s\[\]]+\]")  # [INST], [/INST], [TOOL_CALLS]
_TAG = re.compile(r"</?([^\s<>/]+)/?>")  # <tool_call>, </think>, <start_of_turn>
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_HTML = frozenset(
    "a abbr address article aside audio b bdi bdo blockquote body br button canvas caption center cite code col colgroup data dd del details dfn dialog div dl dt "
    "em embed fieldset figcaption figure font footer form h1 h2 h3 h4 h5 h6 head header hr html i iframe img input ins kbd label legend li link main map mark "
    "math menu meta nav noscript object ol option p param picture pre q rp rt ruby s samp script section select small span strike strong style sub summary sup "
    "svg table tbody td template textarea tfoot th thead time title tr track tt u ul var video wbr".split()
)


def stages_of(raw: str) -> Stage:
    """Return a tokenizer.json without its vocabulary and merges, which are skipped unread."""
    return msgspec.to_builtins(_decode(raw))


def check_growth(data: Stage) -> None:
    """Raise ValueError for a tokenizer.json that turns a short text into a long one, and any exception if it is not a
    tokenizer."""
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        stages = [stage for part in parts for stage in _objects(data.get(part))]
        if len(stages) > MOST_STAGES:
            raise ValueError(f"its {' and '.join(parts)} have {len(stages):,} parts; {MOST_STAGES} is the limit")
        if math.prod(map(_growth, stages)) > MOST_GROWTH:
            raise ValueError(f"its {' and '.join(parts)} can make a text more than {MOST_GROWTH} times as long")
    for stage in _objects(data.get("post_processor")):
        single, tokens = stage.get("single", []), stage.get("special_tokens", {})
        added = len(single) * max((len(token["ids"]) for token in tokens.values()), default=0) if tokens else 0
        if added > MOST_SPECIAL or sum("Sequence" in piece for piece in single) > 1:
            raise ValueError("its post_processor repeats a text, or adds too many tokens to it")


def _objects(value: Any) -> Iterator[Stage]:
    """Yield all objects in a JSON value. Stages are recognised by their fields, since the library reads some without a
    type."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(part)


def _growth(stage: Stage) -> float:
    """Return the factor by which a stage lengthens a text at most. An empty pattern matches around each character, and
    a Regex may match nothing too."""
    factor = 1.0
    if "pattern" in stage and "content" in stage:  # Replace
        pattern, content = stage["pattern"], stage["content"]
        literal = pattern if isinstance(pattern, str) else pattern.get("String")
        factor = max(1.0, len(content) / len(literal)) if literal else 1.0 + len(content)
    if "prepend" in stage:
        factor = 1.0 + len(stage["prepend"])  # once for each part of the text between added tokens
    if stage.get("type") == "ByteLevel" or "trim_offsets" in stage:
        factor = 2.0  # a character for each byte, of one or two bytes
    if stage.get("type") == "Metaspace" or "replacement" in stage:
        factor = 2.0  # before each part
    if "" in (stage.get("suffix"), stage.get("word_delimiter_token")):  # BPEDecoder, CTC
        factor = 2.0
    if "precompiled_charsmap" in stage:
        blob = base64.b64decode(stage["precompiled_charsmap"])
        texts = blob[4 + int.from_bytes(blob[:4], "little") :]
        factor = max(1.0, max(map(len, texts.split(b"\0"))) / 12)  # NFKC has one of 33 bytes, for 3 bytes
    return factor


def for_the_middle(data: Stage) -> Stage:
    """Return a tokenizer.json that encodes text as the middle of a longer one: nothing is put before it (the mark or
    space that SentencePiece and ByteLevel may put before a word), and nothing is stripped from its ends.

    Returns `data` itself if it already does so.
    """
    middle = data | {name: _middle(data[name]) for name in ("normalizer", "pre_tokenizer")}
    return data if middle == data else middle


def without_added(added: Sequence[Stage], removed: Collection[int | None], model: Model) -> list[Stage]:
    """Return added tokens without some of them; the ids of the others stay.

    A token that is not in the model's vocabulary gets its id from its position in the list, so a removed one is
    replaced by an unmatchable token.
    """
    nonce = secrets.token_hex(16)  # no text contains it
    kept = [
        token if token["id"] not in removed else token | {"content": f"{nonce}{token['id']}", "normalized": False}
        for token in added
        if token["id"] not in removed or model.token_to_id(token["content"]) is None
    ]
    return [] if all(token["id"] in removed for token in kept) else kept


def sharing_model(tokenizer: Tokenizer, data: Stage, added: Sequence[Stage]) -> Tokenizer:
    """Return a tokenizer that shares another one's model (most of its memory, and of the time to read it), with the
    normalizer and pre_tokenizer of `data` and these added tokens. It puts no tokens around a text."""
    stages = {name: data[name] for name in ("normalizer", "pre_tokenizer")}
    made = Tokenizer.from_str(json.dumps(NOTHING | stages))
    made.model = tokenizer.model
    for special, run in groupby(added, key=itemgetter("special")):  # as the library adds those of a file
        tokens = [AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in run]
        (made.add_special_tokens if special else made.add_tokens)(tokens)
    return made


def _middle(stage: Stage | None) -> Stage | None:
    """Return the stage without its changes to the beginning and end of a text; None if nothing remains."""
    if stage is None:
        return None
    for parts in ("normalizers", "pretokenizers"):
        if parts in stage:
            return stage | {parts: [kept for part in stage[parts] if (kept := _middle(part)) is not None]}
    match stage["type"]:
        case "Prepend" | "Strip":
            return None
        case "Metaspace":
            older = {"add_prefix_space": False} if "add_prefix_space" in stage else {}
            return stage | {"prepend_scheme": "never"} | older
        case "ByteLevel":
            return stage | {"add_prefix_space": False}
    return stage


def is_local(decoder: Stage | None) -> bool:
    """Return whether a decoder of tokenizer.json depends only on neighbouring tokens, except at the beginning of a
    text. False for an unknown stage."""
    joined = False  # later stages get one text instead of tokens
    for stage in _stages(decoder):
        match stage["type"]:
            case "ByteLevel" | "Fuse":
                joined = True
            case "Metaspace":
                pass
            case "ByteFallback" | "WordPiece" | "BPEDecoder" if not joined:
                pass
            case "Strip" if not joined or stage["stop"] == 0:
                pass
            case "Replace" if not joined or len(stage["pattern"].get("String", "")) == 1:
                pass
            case _:
                return False
    return True


def _stages(decoder: Stage | None) -> list[Stage]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [stage for part in decoder["decoders"] for stage in _stages(part)]
    return [decoder]


def is_control(content: str, *, special: bool, template: str) -> bool:
    """Return whether an added token is a control token: it is special, has the form of one, or occurs in the chat
    template.

    White space, bytes (<0x0A>) and HTML elements do not have this form. White space is in every template and counts as
    text.
    """
    if special:
        return True
    text = content.replace("\u2581", " ").strip()
    return text != "" and (_has_form(text) or content in template)


def _has_form(text: str) -> bool:
    tag = _TAG.fullmatch(text)
    if tag is not None and (tag[1].lower() in _HTML or BYTE.fullmatch(text)):
        return False
    return bool(_BARRED.fullmatch(text) or _BRACKETED.fullmatch(text) or _TAG.fullmatch(text))
