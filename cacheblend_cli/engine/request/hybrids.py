"""Requests to hybrids: stored KV is restored at the beginning of a prompt, and nothing is blended."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import AskRequest, BlendParams


def exact_only(ask: AskRequest, name: str) -> AskRequest:
    """Return the request with blending turned off. name: of the model. Raises UsageError for settings of blending."""
    blend = ask.blend
    if ask.options.auto or (blend.mode == "blend" and replace(blend, seed=0) != BlendParams()):
        raise UsageError(
            f"{name} has recurrent layers, which need every token in order: there is no ratio, and no selector",
            "leave --ratio, --selector and what belongs to them out: KV is restored where it is exact",
        )
    return replace(ask, blend=replace(blend, selector="all") if blend.mode == "blend" else blend)


def check_reuse(request: Request) -> str | None:
    """Return a note on how much of the prompt is restored, None in mode full. Raises UsageError for mode reuse if other
    stored KV is needed."""
    plan, name = request.plan, request.collection.model.name
    if request.blend.mode == "full":
        return None
    if request.blend.mode == "reuse" and any(s.status == "computed" for s in plan.chunks):
        raise UsageError(
            f"--mode reuse is not possible: {name} has recurrent layers, so stored KV is right only at the beginning of a prompt",
            "leave --mode out: the other chunks are computed",
        )
    restored, total = plan.stored_until, plan.num_tokens
    return (
        f"{restored:,} of the prompt's {total:,} tokens ({restored / total:.0%}) are restored and the rest is computed: {name} has "
        "recurrent layers, for which stored KV is right only at the beginning of a prompt"
    )
