"""After an answer: mark used chunks, and store missing ones (`store_missing.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cacheblend_store import ChunkStore

from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.events import OnEvent
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import Answer, BlendParams


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    return request, None if request.store is None else KeptChunks(request.store)


class KeptChunks(Hook):
    """Updates the store with the chunks of a request, and reports the use of its tier."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        answer.tier = None if report.request.tiered is None else report.request.tiered.use

    def on_done(self, report: PrefillReport, answers: Sequence[Answer], emit: OnEvent) -> Iterator[None] | None:
        request, plan = report.request, report.plan
        if request.full_for_speed:  # it stands for a blended prompt
            plan = replace(request, blend=BlendParams()).plan
        elif request.blend.mode == "full":  # it reused nothing
            return None
        if request.tiered is not None and self._store.tier is not None:
            from cacheblend_cli.engine.request.tiered import remember_speed

            remember_speed(self._store.tier)
        used = [s.key for s in plan.chunks if s.cached and s.key]
        # before missing chunks are stored, which may need room
        self._store.touch([*used, request.collection.prefix_key] if request.prefix_cached else used)
        missing = {c.input.key for c in request.chunks if not c.input.cached}
        missing &= {s.key for s in plan.chunks if s.key and s.status == "computed"}
        if plan.in_order:
            from cacheblend_cli.engine.request.hybrids import to_collect

            missing = to_collect(request, missing)
        if not (request.options.save and self._store.writable) or not (missing or request.tiered):
            return None
        from cacheblend_cli.engine.features.store_missing import store_missing

        return store_missing(report, self._store, missing)
