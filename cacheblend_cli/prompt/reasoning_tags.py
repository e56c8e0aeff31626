"""Tags around a model's reasoning, as written by its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    open: str
    close: str  # the answer follows


THINK = ReasoningTags("<think>", "</think>")
KNOWN = (
    THINK,
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ReasoningTags("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningTags("<|channel>", "<channel|>"),  # Gemma 4
    ReasoningTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)


def find_tags(ending: str, knows: Callable[[str], bool]) -> ReasoningTags | None:
    """Return the tags of a model, None if it uses none of `KNOWN`.

    ending: stripped template text after the question; it may already open or close the reasoning.
    knows: returns whether a text is a token or occurs in the template.
    """
    at_end = (tags for tags in KNOWN if ending.endswith((tags.open, tags.close)))
    known = (tags for tags in KNOWN if knows(tags.open) or knows(tags.close))
    return next(at_end, next(known, None))
