"""Reports: of a prefilled prompt, and of a finished sequence as an Answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.device_time import DeviceTime
from cacheblend_cli.engine.worker.sampling import logprobs_of
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import Answer, AutoReport, ChunkUse, Timing, TokenLogprob


@dataclass(frozen=True)
class PrefillReport:
    """A prompt whose KV is in the pool."""

    request: Request  # as it was finally run
    result: PrefillResult
    loader: KVLoader  # figures of loading
    prefill_time: DeviceTime
    prefix_cache_tokens: int = 0  # leading tokens whose KV came from the prefix cache
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of every token but the first, where requested

    @property
    def prefill_s(self) -> float:
        """Seconds of the prefill on the device, waits for KV included. On a GPU this waits for its end."""
        return self.prefill_time.seconds

    @property
    def plan(self) -> PromptPlan:
        return self.request.plan

    @property
    def logits(self) -> Tensor:
        """fp32 [vocab_size], after the prompt's last token."""
        return self.result.logits[-1]

    @property
    def has_missing(self) -> bool:
        """Return whether there are chunks to store after the answer: computed, or from the tier."""
        store, request = self.request.store, self.request
        if store is None or not store.writable or request.blend.mode == "full":
            return False
        return request.tiered is not None or any(s.status == "computed" for s in self.plan.chunks)

    @property
    def recompute_fraction(self) -> float:
        """Fresh token-layers over layers x reusable tokens; 1 for a full prefill, which reuses nothing."""
        reusable = self.plan.cached_tokens
        return self.result.fresh_token_layers / (len(self.result.layers) * reusable) if reusable else 1.0


class PromptLogprobs:
    """Sink that computes the log-probabilities of a prompt's tokens from its rows' logits, from position 0 on."""

    def __init__(self, token_ids: list[int], top: int) -> None:
        self._token_ids, self._top, self.found = token_ids, top, list[TokenLogprob]()

    def __call__(self, logits: Tensor) -> None:
        """Add the log-probabilities of the tokens after these rows; there is none after the last row."""
        begin = len(self.found) + 1
        ids = upload(self._token_ids[begin : begin + len(logits)], logits.device)
        if len(ids):
            self.found += logprobs_of(logits[: len(ids)], ids, self._top)


def answer_of(runtime: Runtime, done: PrefillReport, generation: Generation, report: AutoReport | None) -> Answer:
    """Return the answer, without results of checks. done: its prefilled prompt."""
    request, plan, loader, chosen = done.request, done.plan, done.loader, done.result.chosen.tolist()
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
        recomputed_tokens=len(chosen),
        recompute_fraction=done.recompute_fraction,
        chunks=_chunk_uses(done, chosen, generation.attention),
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
        chosen=chosen,
        tier=None if request.tiered is None else request.tiered.use,
        auto=None if report is None else replace(report, ttft_s=ttft_s),
    )


def _chunk_uses(done: PrefillReport, positions: list[int], attention: list[float] | None) -> list[ChunkUse]:
    """Return the report of each chunk. positions: recomputed ones. attention: share of each chunk, None if unknown."""
    uses = list[ChunkUse]()
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
                place=chunk.citation.place,
                headings=chunk.citation.locator.headings,
                rank=chunk.rank,
                attention=None if attention is None else round(attention[i], 4),
            )
        )
    return uses
