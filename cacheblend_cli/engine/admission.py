"""Admission of a request: whether it is possible, and what it will do."""

from __future__ import annotations

from cacheblend_cli.engine.checks import Checks, seeded
from cacheblend_cli.engine.controller import deciding
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sequence import RequestState, Sequence
from cacheblend_cli.engine.speeds import Pieces


def admitting(runtime: Runtime, state: RequestState) -> Pieces[None]:
    """Check that a submitted request is possible. Raises UsageError."""
    request = state.request
    state.max_new_tokens = runtime.max_new_tokens(request.sampling)
    runtime.check_length(request.plan.num_tokens, state.max_new_tokens)
    if request.options.confirm or request.blend.max_risk is not None:
        request = seeded(request)
    if request.options.auto:
        request, state.report = yield from deciding(runtime, request)
    state.request, state.checks = request, Checks.of(request)
    state.sequences = [Sequence(state, 0)]
