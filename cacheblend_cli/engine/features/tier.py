"""The store's tier: the report of its use, and its speed, which is kept for the next process."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.events import OnEvent
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import Answer


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    return request, None if request.tiered is None else TierUse(request)


class TierUse(Hook):
    """Use of the tier by one request."""

    def __init__(self, request: Request) -> None:
        self._tiered, self._store = request.tiered, request.store

    def on_answers(self, made: Sequence[tuple[Generation, Answer]]) -> None:
        for _, answer in made:
            answer.tier = None if self._tiered is None else self._tiered.use

    def on_done(self, report: PrefillReport, answers: Sequence[Answer], emit: OnEvent) -> None:
        from cacheblend_cli.engine.request.tiered import remember_speed

        if self._store is not None and self._store.tier is not None:
            remember_speed(self._store.tier)
