"""Prompt lookup: proposes the next tokens of an answer from an earlier place of its last ones, in the prompt or the
answer (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_MATCH, MOST_MATCH = 2, 8
"""Tokens of the shortest match, and of the longest; more equal tokens are not counted."""
MOST_PLACES = 64
"""Maximum places of a pair of tokens that are compared, the latest first."""


@dataclass(frozen=True)
class Match:
    """An earlier place of the last tokens."""

    num_tokens: int  # last tokens that are equal there, up to MOST_MATCH
    followers: tuple[int, ...]  # token ids after it, continued in a circle where they reach the last token


class PromptLookup:
    """Index of the tokens of a prompt and its answer, by pairs of tokens. It grows with the answer."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list[int]()
        self._places = dict[tuple[int, int], int]()  # pair of tokens -> index after its latest place
        self._earlier = [0]  # of each index after a pair: the index after the pair's place before that one, 0 for none
        self._extend(prompt_ids)
        self._num_prompt_tokens = len(prompt_ids)

    def find(self, answer_ids: Sequence[int], most: int) -> Match | None:
        """Return the longest match, the latest of several, with `most` followers; None without any. answer_ids: the
        tokens of the last call, and more."""
        self._extend(answer_ids[len(self._ids) - self._num_prompt_tokens :])
        place, longest, found = self._earlier[-1], LEAST_MATCH - 1, 0
        for _ in range(MOST_PLACES):
            if not place or longest == MOST_MATCH:
                break
            if (length := self._length(place)) > longest:
                longest, found = length, place
            place = self._earlier[place]
        if not found:
            return None
        period = len(self._ids) - found
        return Match(longest, tuple(self._ids[found + i % period] for i in range(most)))

    def _length(self, place: int) -> int:
        """Return the number of equal tokens before an earlier place of the last pair."""
        ids, end, length = self._ids, len(self._ids), LEAST_MATCH
        while length < min(MOST_MATCH, place) and ids[place - length - 1] == ids[end - length - 1]:
            length += 1
        return length

    def _extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = 0
            if self._ids:
                pair = self._ids[-1], token_id
                place, self._places[pair] = self._places.get(pair, 0), len(self._ids) + 1
            self._ids.append(token_id)
            self._earlier.append(place)
