"""Answer of a finished sequence: the generated text, the sources of the prompt's KV, and timing."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.blend.cost import AutoReport
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.engine.core.prefill_report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import Answer, ChunkUse, Timing


def answer_of(runtime: Runtime, done: PrefillReport, generation: Generation, report: AutoReport | None) -> Answer:
    """Return the answer, without results of checks. done: its prefilled prompt."""
    request, plan, loader = done.request, done.plan, done.loader
    if generation.reasoning_cut:
        request.notes.append(
            f"the reasoning was ended after {request.sampling.reasoning_tokens:,} tokens (--reasoning-tokens)"
        )
    ttft_s = generation.first_token_at - request.started
    return Answer(
        text=generation.text,
        reasoning=generation.reasoning,
        reasoning_tokens=generation.reasoning_tokens,
        finish_reason=generation.finish_reason,
        model=runtime.model.name,
        mode=request.blend.mode,
        selector=request.blend.selector,
        ratio=request.blend.effective_ratio(),
        ratio_from=request.ratio_from,
        prompt_tokens=plan.num_tokens,
        cached_tokens=plan.cached_tokens,
        exact_tokens=plan.exact_tokens,
        prefix_cache_tokens=done.prefix_cache_tokens,
        recomputed_tokens=len(done.result.chosen),
        recompute_fraction=done.recompute_fraction,
        chunks=_chunk_uses(done, generation.attention),
        timing=Timing(
            process_s=since_process_start(generation.first_token_at),
            model_load_s=runtime.load_s,
            kv_load_s=loader.load_s,
            kv_load_stall_s=loader.stall_s,
            prefill_s=done.prefill_s,
            ttft_s=ttft_s,
            decode_tokens_per_s=generation.tokens_per_s,
        ),
        kv_bytes_loaded=loader.num_bytes,
        prompt_ids=plan.token_ids,
        generated_ids=generation.token_ids,
        logprobs=generation.logprobs,
        prompt_logprobs=list(done.prompt_logprobs),
        notes=request.notes,
        weak_match=request.weak_match,
        hits_cut=request.hits_cut,
        layers=done.result.layers,
        chosen=done.result.chosen.tolist(),
        tier=None if request.tiered is None else request.tiered.use,
        auto=None if report is None else replace(report, ttft_s=ttft_s),
    )


def _chunk_uses(done: PrefillReport, attention: list[float] | None) -> list[ChunkUse]:
    """Return the report of each chunk. attention: share of each chunk, None if unknown."""
    positions, uses = done.result.chosen.tolist(), list[ChunkUse]()
    for i, (segment, chunk) in enumerate(zip(done.plan.chunks, done.request.chunks, strict=True)):
        recomputed = sum(segment.start <= p < segment.end for p in positions)
        uses.append(
            ChunkUse(
                id=segment.key.hex() if segment.key else "",
                source=segment.source,
                tokens=len(segment.token_ids),
                status=segment.status,
                recomputed=len(segment.token_ids) if segment.status == "computed" else recomputed,
                start=segment.start,
                place=chunk.citation.locator.text,
                headings=chunk.citation.locator.headings,
                rank=chunk.rank,
                attention=None if attention is None else round(attention[i], 4),
            )
        )
    return uses
