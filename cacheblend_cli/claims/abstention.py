"""Answers that say that the texts lack the answer, and texts that have the question's words nevertheless."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cacheblend_cli.claims.words import COMMON, folded, is_cjk, words

_LONGEST = 400  # characters: what is longer says more
_LEAST = 0.6  # share of the question's words that a text has
_STEM = 5  # first letters that inflected words have in common
_TEXTS = "(?:documents?|passages?|sources?|texts?|context|excerpts?|pages?|information)"
_SAY = "(?:say|mention|state|specif|contain|provide|include|give|indicat|cover|address|describe|list|answer|available|found)"
_ABSTAINS = re.compile(
    rf"""\bnot\ (?:\w+\ ){{0,3}}(?:in|by|from|within)\ (?:\w+\ ){{0,3}}{_TEXTS}\b
    |\b{_TEXTS}\ (?:\w+\ ){{0,3}}(?:(?:do|does|did|is|are|was)\ not|(?:do|does|did|is|are|was)n't)\ (?:\w+\ ){{0,2}}{_SAY}
    |\bno\ (?:\w+\ ){{0,2}}(?:information|mention|details?|answer)\b
    |\bi\ (?:do\ not|don't|cannot|can't|could\ not|couldn't)\ (?:know|find|answer|tell|determine)\b
    |\bnicht\ (?:\w+\ ){{0,2}}(?:in|aus)\ (?:\w+\ ){{0,2}}(?:dokument|unterlage|quelle|text)|\bkeine\ (?:angabe|information|auskunft)
    |\bpas\ (?:\w+\ ){{0,2}}dans\ (?:\w+\ ){{0,2}}(?:document|texte|source)|\baucune\ (?:information|mention)
    |\bno\ (?:\w+\ ){{0,3}}en\ (?:\w+\ ){{0,2}}(?:documento|texto|fuente)|\bno\ hay\ información""",
    re.VERBOSE,
)


def abstains(answer: str) -> bool:
    """Return whether a short answer says that the texts lack it, in the words of the default prompt or common ones."""
    return len(answer) <= _LONGEST and _ABSTAINS.search(folded(answer)) is not None


def text_with_words_of(question: str, texts: Sequence[str]) -> int | None:
    """Return the number of the text that has most of the question's words; None if none has enough of them."""
    wanted = _stems(question)
    shares = [len(wanted & _stems(text)) for text in texts]
    most = max(shares, default=0)
    return shares.index(most) if most and most >= _LEAST * len(wanted) else None


def _stems(text: str) -> set[str]:
    """Return the first letters of the words that tell something, and pairs of letters where no spaces divide words."""
    own = [word for word in words(folded(text)) if word not in COMMON]
    pairs = (word[i : i + 2] for word in own if is_cjk(word[0]) for i in range(max(1, len(word) - 1)))
    return {word[:_STEM] for word in own if not is_cjk(word[0])} | set(pairs)
