"""How an answer, and the plan of one, are shown."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli.output import Output

if TYPE_CHECKING:
    from cacheblend_cli.api import Answer, AskPlan


def show_answer(answer: Answer, output: Output, *, json: bool, ids: bool, explain: bool, extra: dict[str, Any]) -> None:
    """After the text has been streamed: what was said of it, or all of it as one JSON object with `extra` before."""
    for note in answer.notes:
        output.warn(note)
    if json:
        output.json({**extra, **answer.to_dict(ids=ids, explain=explain)})
        return
    output.text("")
    if explain:
        _explain(answer, output)
    output.note(summary_line(answer))
    if answer.verify:
        v = answer.verify
        agrees = round(v.answer_top1 * v.answer_tokens)
        output.note(
            f"verify: KL {v.kl:.4g} nats to a full prefill, first token {'agrees' if v.top1_agree else 'DIFFERS'}; "
            f"over its answer KL {v.answer_kl:.4g} a token, {agrees} of {v.answer_tokens} tokens agree; "
            f"full prefill {v.full_ttft_s * 1000:.0f} ms"
        )


def summary_line(answer: Answer) -> str:
    """Sources, tokens, share recomputed, time to the first token, tokens/s."""
    sources = list(dict.fromkeys(PurePosixPath(c.source).name for c in answer.chunks))
    shown = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
    if answer.mode == "full" or not answer.cached_tokens:
        work = "full prefill"
    else:
        work = (
            f"{answer.recomputed_tokens} of {answer.cached_tokens} cached tokens recomputed "
            f"({answer.recompute_fraction:.0%} of the work)"
        )
    t = answer.timing
    speed = f", {t.decode_tokens_per_s:.0f} tokens/s" if t.decode_tokens_per_s else ""
    first = f"first token {t.ttft_s * 1000:.0f} ms"
    return f"[{shown or 'no sources'}] {answer.prompt_tokens} prompt tokens, {work}, {first}{speed}"


def show_plan(plan: AskPlan, output: Output, *, json: bool, extra: dict[str, Any]) -> None:
    """`ask --dry-run`: data, so on stdout."""
    if json:
        output.json({**extra, **vars(plan)})
        return
    if plan.chunks:
        rows = [(c["id"][:12], c["tokens"], c["status"], c["source"]) for c in plan.chunks]
        output.table(("chunk", "tokens", "status", "source"), rows, right=(1,))
    output.text(
        f"{plan.prompt_tokens} prompt tokens: {plan.cached_tokens} cached ({plan.exact_tokens} exact), "
        f"{plan.fresh_tokens} fresh; {plan.kv_bytes / 2**20:.1f} MiB of KV to load"
    )


def _explain(answer: Answer, output: Output) -> None:
    for layer in answer.layers:
        deviation = "" if layer.mean_deviation is None else f", mean deviation {layer.mean_deviation:.4g}"
        output.note(
            f"layer {layer.layer:>2}  {layer.status.name:<11} {layer.rows} rows, {layer.fresh} of them reusable{deviation}"
        )
    for chunk in answer.chunks:
        output.note(
            f"chunk {chunk.id[:12]}  {chunk.status:<8} {chunk.recomputed}/{chunk.tokens} recomputed  {chunk.source}"
        )
