"""How an answer, and the plan of one, are shown."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size

if TYPE_CHECKING:
    from cacheblend_cli.api import Answer, AskPlan
    from cacheblend_cli.runtime.controller import AutoReport


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
    if answer.auto:
        work += f" by --ratio auto ({answer.auto.decision.mode} {answer.ratio:.2g})"
    speed = f", {t.decode_tokens_per_s:.0f} tokens/s" if t.decode_tokens_per_s else ""
    first = f"first token {t.ttft_s * 1000:.0f} ms"
    if answer.auto:
        first += f" ({answer.auto.predicted_ttft_s * 1000:.0f} predicted)"
    return f"[{shown or 'no sources'}] {answer.prompt_tokens} prompt tokens, {work}, {first}{speed}"


def show_plan(plan: AskPlan, output: Output, *, json: bool, extra: dict[str, Any]) -> None:
    """`ask --dry-run`: data, so on stdout."""
    if json:
        output.json({**extra, **vars(plan)})
        return
    if plan.chunks:
        rows = [(c["id"][:12], c["tokens"], c["status"], c["source"]) for c in plan.chunks]
        output.table(("chunk", "tokens", "status", "source"), rows, right=(1,), ends=(3,))
    before = plan.prompt_tokens - plan.cached_tokens - plan.fresh_tokens
    output.text(
        f"{plan.prompt_tokens} prompt tokens: {plan.cached_tokens} cached ({plan.exact_tokens} exact), "
        + (f"{before} before them cached too, " if before else "")
        + f"{plan.fresh_tokens} fresh; {format_size(plan.kv_bytes)} of KV to load"
    )
    if plan.auto:
        a = plan.auto
        output.text(
            f"--ratio auto: {a['mode']} at ratio {a['ratio']:.2g}, first token after {a['predicted_ttft_s'] * 1000:.0f} ms, "
            f"{a['predicted_full_ttft_s'] * 1000:.0f} ms by a full prefill"
        )


def _explain(answer: Answer, output: Output) -> None:
    for layer in answer.layers:
        output.note(
            f"layer {layer.layer:>2}  {layer.status.name:<11} {layer.rows} rows, {layer.fresh} of them reusable"
        )
    if answer.auto:
        _explain_auto(answer.auto, answer, output)
    for chunk in answer.chunks:
        output.note(
            f"chunk {chunk.id[:12]}  {chunk.status:<8} {chunk.recomputed}/{chunk.tokens} recomputed  {chunk.source}"
        )


def _explain_auto(auto: AutoReport, answer: Answer, output: Output) -> None:
    """The estimate's parts beside what was measured, in milliseconds."""
    d, t = auto.decision, answer.timing
    why = f"ratio {d.ratio:.2g}, {d.floor:.2g} at least"
    if d.mode == "full":
        why = "full prefill, which is estimated to be faster than loading and blending"
    output.note(f"auto: {why}; a layer takes {_ms(d.layer_compute_s)} to recompute and {_ms(d.layer_load_s)} to load")
    output.note(
        f"auto: predicted first token {_ms(auto.predicted_ttft_s)} = {_ms(auto.before_s)} before, {_ms(d.chosen.compute_s)} "
        f"computing, {_ms(d.chosen.stall_s)} waiting for {_ms(d.chosen.load_s)} of loading, {_ms(auto.speeds.rest_s)} after; "
        f"a full prefill {_ms(auto.predicted_full_ttft_s)}"
    )
    output.note(
        f"auto: actual first token {_ms(t.ttft_s)}, of it {_ms(t.prefill_s - t.kv_load_stall_s)} computing and "
        f"{_ms(t.kv_load_stall_s)} waiting for {_ms(t.kv_load_s)} of loading"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
