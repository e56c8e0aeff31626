"""Reports: of a prefilled prompt, and of a finished sequence as an Answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import Answer, ChunkUse, Timing


@dataclass(frozen=True)
class PrefillReport:
    """A request whose prompt's KV is in the pool: what the core and its hooks know of it."""

    request: Request  # as it was finally run
    result: PrefillResult  # of the worker
    prefix_cache_tokens: int = 0  # leading tokens whose KV came from the prefix cache

    @property
    def prefill_s(self) -> float:
        """Seconds of the prefill on the device, waits for KV included. On a GPU this waits for its end."""
        return self.result.time.seconds

    @property
    def plan(self) -> PromptPlan:
        return self.request.plan

    @property
    def logits(self) -> Tensor:
        """fp32 [vocab_size], after the prompt's last token."""
        return self.result.logits[-1]

    @property
    def recompute_fraction(self) -> float:
        """Fresh token-layers over layers x reusable tokens; 1 for a full prefill, which reuses nothing."""
        reusable = self.plan.cached_tokens
        return self.result.fresh_token_layers / (len(self.result.layers) * reusable) if reusable else 1.0


def answer_of(runtime: Runtime, done: PrefillReport, generation: Generation) -> Answer:
    """Return the answer, without reports of features. done: its prefilled prompt."""
    request, plan, loader, chosen = done.request, done.plan, done.result.loader, done.result.chosen.tolist()
    if generation.reasoning_cut:
        most = request.sampling.reasoning_tokens
        request.notes.append(f"the reasoning was ended after {most:,} tokens (--reasoning-tokens)")
    return Answer(
        text=generation.text,
        reasoning=generation.reasoning,
        reasoning_tokens=generation.reasoning_tokens,
        accepted_tokens=generation.accepted_tokens,
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
        recomputed_tokens=len(chosen),
        recompute_fraction=done.recompute_fraction,
        chunks=_chunk_uses(done, chosen),
        timing=Timing(
            process_s=since_process_start(generation.first_token_at),
            model_load_s=runtime.load_s,
            kv_load_s=loader.load_s,
            kv_load_stall_s=loader.stall_s,
            prefill_s=done.prefill_s,
            ttft_s=generation.first_token_at - request.started,
            decode_tokens_per_s=generation.tokens_per_s,
        ),
        kv_bytes_loaded=loader.num_bytes,
        prompt_ids=plan.token_ids,
        generated_ids=generation.token_ids,
        logprobs=generation.logprobs,
        notes=request.notes,
        weak_match=request.weak_match,
        hits_cut=request.hits_cut,
        hits_repeated=request.hits_repeated,
        layers=list(done.result.layers),
        chosen=chosen,
    )


def _chunk_uses(done: PrefillReport, positions: list[int]) -> list[ChunkUse]:
    """Return the report of each chunk. positions: recomputed ones."""
    uses = list[ChunkUse]()
    for segment, chunk in zip(done.plan.chunks, done.request.chunks, strict=True):
        recomputed = sum(segment.start <= p < segment.end for p in positions)
        uses.append(
            ChunkUse(
                id=segment.key.hex() if segment.key else "",
                source=segment.source,
                tokens=segment.num_tokens,
                status=segment.status,
                recomputed=segment.num_tokens if segment.status == "computed" else recomputed,
                start=segment.start,
                place=chunk.citation.place,
                headings=chunk.citation.locator.headings,
                rank=chunk.rank,
                also_in=chunk.citation.also_in,
            )
        )
    return uses
