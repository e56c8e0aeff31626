"""Stages of a tokenizer.json: inspected, and edited to encode text in the middle of a prompt."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

Stage = dict[str, Any]


def for_the_middle(data: Stage) -> Stage:
    """A tokenizer.json that encodes text as the middle of a longer one: with nothing put before it (the mark or space
    that SentencePiece and ByteLevel may put before a word) and nothing stripped from its ends.

    `data` itself, when that is what it does already.
    """
    normalizer, pre_tokenizer = _middle(data.get("normalizer")), _middle(data.get("pre_tokenizer"))
    if normalizer == data.get("normalizer") and pre_tokenizer == data.get("pre_tokenizer"):
        return data
    return data | {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}


def without_added(data: Stage, removed: Collection[int]) -> Stage:
    """Return a tokenizer.json without some of its added tokens; the ids of the others stay.

    A token that the model's vocabulary lacks gets its id by its place in the list, so an unmatchable one takes its place.
    """
    vocabulary = data["model"].get("vocab", {})
    nonce = secrets.token_hex(16)  # so that no text contains it
    added = [
        token if token["id"] not in removed else token | {"content": f"{nonce}{token['id']}", "normalized": False}
        for token in data.get("added_tokens") or ()
        if token["id"] not in removed or token["content"] not in vocabulary
    ]
    if all(token["id"] in removed for token in added):
        added = []
    return data | {"added_tokens": added}


def _middle(stage: Stage | None) -> Stage | None:
    """A normalizer or pre-tokenizer without what it does to the beginning and the end of a text; None: that was all."""
    if stage is None:
        return None
    for parts in ("normalizers", "pretokenizers"):
        if parts in stage:
            return stage | {parts: [kept for part in stage[parts] if (kept := _middle(part)) is not None]}
    match stage["type"]:
        case "Prepend" | "Strip":
            return None
        case "Metaspace":
            return (
                stage
                | {"prepend_scheme": "never"}
                | ({"add_prefix_space": False} if "add_prefix_space" in stage else {})
            )
        case "ByteLevel":
            return stage | {"add_prefix_space": False}
    return stage


def is_local(decoder: Stage | None) -> bool:
    """Return whether a decoder of tokenizer.json looks no further than the neighbours of a token, but for the text's beginning.

    False for a stage this does not know.
    """
    joined = False  # what follows sees one text in the place of tokens
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
