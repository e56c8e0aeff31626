"""A prompt lookup that knows the answers: right proposals, with a wrong token at known places."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest
from engine_driver import Listener

from cacheblend_cli.engine.features import speculation
from cacheblend_cli.engine.features.prompt_lookup import MOST_MATCH, Match

FAR = 7  # proposed after the end of a known answer
WRONG = ("nowhere", "first", "middle", "last", "no proposal")


class Oracle:
    """Answers by prompt. The place of the wrong token changes from call to call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wrong = Counter[str]()  # proposals by the place of their wrong token
        self._answers = defaultdict[tuple[int, ...], list[list[int]]](list)
        monkeypatch.setattr(speculation, "PromptLookup", lambda prompt_ids: OracleLookup(self, prompt_ids))

    def learn(self, listeners: Iterable[Listener]) -> None:
        for listener in listeners:
            for answer in listener.done().answers:
                self.learn_answer(answer.prompt_ids, answer.generated_ids)

    def learn_answer(self, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        self._answers[tuple(prompt_ids)].append(list(generated_ids))

    def known(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[int] | None:
        """The longest answer that begins with these tokens, else any of the prompt's, None without one."""
        known, count = self._answers.get(tuple(prompt_ids), []), len(answer_ids)
        same = [ids for ids in known if ids[:count] == list(answer_ids)]
        return max(same or known, key=len, default=None)


class OracleLookup:
    """Of one sequence."""

    def __init__(self, oracle: Oracle, prompt_ids: Sequence[int]) -> None:
        self._oracle, self._prompt_ids, self._calls = oracle, list(prompt_ids), 0

    def find(self, answer_ids: Sequence[int], most: int) -> Match | None:
        known = self._oracle.known(self._prompt_ids, answer_ids)
        wrong = WRONG[self._calls % len(WRONG)]
        self._calls += 1
        if known is None or not most or wrong == "no proposal":
            return None
        ids = [*known[len(answer_ids) :], *[FAR] * most][:most]
        if wrong != "nowhere":
            place = {"first": 0, "middle": len(ids) // 2, "last": len(ids) - 1}[wrong]
            ids[place] = (ids[place] + 1) % 300
        self._oracle.wrong[wrong] += 1
        return Match(MOST_MATCH, tuple(ids))
