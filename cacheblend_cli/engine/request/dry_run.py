"""`ask --dry-run`: what a request would take, without running it."""

from __future__ import annotations

from cacheblend_cli.engine.auto.controller import decided, kv_bytes
from cacheblend_cli.engine.request.resolve import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import AskPlan


def plan(runtime: Runtime, request: Request) -> AskPlan:
    """Return what running the request would do. Raises UsageError if it would be refused."""
    request, report = decided(runtime, request) if request.options.auto else (request, None)
    prompt = request.plan
    runtime.check_length(prompt.num_tokens, runtime.max_new_tokens(request.sampling))
    uses = [
        {"id": s.key.hex() if s.key else "", "source": s.source, "tokens": len(s.token_ids), "status": s.status}
        for s in prompt.chunks
    ]
    return AskPlan(
        prompt.num_tokens,
        prompt.cached_tokens,
        prompt.exact_tokens,
        prompt.fresh_tokens,
        kv_bytes(request),
        uses,
        report.to_dict() if report else None,
        [*request.notes, *filter(None, (runtime.decode_with.note,))],
    )
