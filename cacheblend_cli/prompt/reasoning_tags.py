"""Tags around a model's reasoning, as its chat template writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """open: text that begins the reasoning. close: text that ends it; the answer follows."""

    open: str
    close: str


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
    """Return the tags of a model. None: it has none of `KNOWN`.

    ending: text after the question, stripped: the template may have opened or closed the reasoning. knows: whether a text is a token or
    occurs in the template.
    """
    at_end = (tags for tags in KNOWN if ending.endswith((tags.open, tags.close)))
    known = (tags for tags in KNOWN if knows(tags.open) or knows(tags.close))
    return next(at_end, next(known, None))
