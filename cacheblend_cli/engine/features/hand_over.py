"""Hand-over of a prompt's KV to another engine, which decodes the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cacheblend_cli.engine.core.hooks import Begun, Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.events import HandedOver, OnEvent
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import Answer

if TYPE_CHECKING:
    from cacheblend_cli.kv.export import Connector, KVReader


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    return request, None if request.connector is None else HandOver(runtime, request.connector)


class HandOver(Hook):
    """Gives the prompt's KV to the connector, and ends the request with an empty answer."""

    def __init__(self, runtime: Runtime, connector: Connector) -> None:
        self._runtime, self._connector = runtime, connector

    def on_prefill(self, report: PrefillReport, export: Callable[[], KVReader]) -> Begun:
        self._connector.hand_over(report.plan.token_ids, export())
        output = SequenceOutput(self._runtime, report.request.sampling, report.plan.token_ids)
        output.out.finish_reason, output.out.first_token_at = "handed_over", time.perf_counter()
        return Begun(output, is_complete=True)

    def on_done(self, report: PrefillReport, answers: Sequence[Answer], emit: OnEvent) -> None:
        emit(HandedOver(answers[0]))
