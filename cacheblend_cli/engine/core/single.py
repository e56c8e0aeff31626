"""A single request: an EngineCore of its own, with a pool as large as it needs."""

from __future__ import annotations

from cacheblend_cli.engine.core.core import EngineCore, admit
from cacheblend_cli.engine.core.pools import pool_for
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.events import Done, Failed, Limits, OnEvent
from cacheblend_cli.engine.request.resolve import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import Answer

ALONE = Limits(max_sequences=128, enable_prefix_caching=False)  # for one request: all of its answers at once


def answer_one(runtime: Runtime, request: Request, on_event: OnEvent) -> list[Answer]:
    """Answer one request in the caller's thread, with a pool as large as it needs. Blending never changes stored KV.

    Raises the request's error, and errors of on_event.
    """
    state, answers = RequestState(request, 0), list[Answer]()
    admit(runtime, state)
    size, headroom = runtime.config.block_size, state.max_new_tokens
    each = -(-(headroom + size) // size) + 1  # blocks that each further answer writes to
    memory = pool_for(runtime, -(-(state.num_tokens + headroom) // size) + 1 + (state.num_answers - 1) * each)
    memory.pool.check_fits(state.num_tokens + headroom)
    core = EngineCore(runtime, ALONE, memory)
    try:
        core.add(state)
        while core.busy:
            for _, event in core.step():
                on_event(event)
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Done):
                    answers = event.answers
    finally:
        core.close()
    return answers
