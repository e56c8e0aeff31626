"""A single request: an EngineCore of its own, with a pool as large as it needs."""

from __future__ import annotations

from cacheblend_cli.engine.admission import admitting
from cacheblend_cli.engine.core import EngineCore
from cacheblend_cli.engine.events import Done, Event, Failed, Limits, OnEvent
from cacheblend_cli.engine.pools import pool_for
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sequence import RequestState
from cacheblend_cli.kv.forward import finish
from cacheblend_cli.types import Answer

_ALONE = Limits(max_sequences=128, enable_prefix_caching=False)  # for one request: all of its answers at once


def answer_one(runtime: Runtime, request: Request, on_event: OnEvent) -> list[Answer]:
    """Answer one request in the caller's thread, with a pool as large as it needs. Blending never changes stored KV.

    Raises what the request fails of, and what on_event raises.
    """
    state, raised = RequestState(request, on_event, 0), list[BaseException]()
    finish(admitting(runtime, state))
    size, headroom = runtime.config.block_size, state.max_new_tokens
    each = -(-(headroom + size) // size) + 1  # blocks that each further answer writes to
    memory = pool_for(runtime, -(-(state.num_tokens + headroom) // size) + 1 + (state.num_answers - 1) * each)
    memory.pool.check_fits(state.num_tokens + headroom)
    answers: list[Answer] = []

    def emit(state: RequestState, event: Event) -> None:
        if isinstance(event, Done):
            answers.extend(event.answers)
        elif isinstance(event, Failed):
            raised.append(event.error)
        try:
            on_event(event)
        except BaseException as error:
            raised.append(error)

    core = EngineCore(runtime, _ALONE, emit, memory)
    try:
        core.add(state)
        while core.busy and not raised:
            core.step()
    finally:
        core.close()
    if raised:
        raise raised[0]
    return answers
