"""ask: request -> prompt plan -> blocks -> KV loader -> blended prefill -> first token -> decode -> answer."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.corpus.citations import Citations
from cacheblend_cli.engine.answer import Answer, ChunkUse, Timing
from cacheblend_cli.engine.attention import AttentionShares, Watch
from cacheblend_cli.engine.clock import since_process_start
from cacheblend_cli.engine.config import DEFAULT_OPTIONS, AskOptions
from cacheblend_cli.engine.confirm import confirm, seeded
from cacheblend_cli.engine.controller import AutoReport, decided, learn_from
from cacheblend_cli.engine.gate import Gate, gated
from cacheblend_cli.engine.generate import NOBODY, Continuation, Generation, Listener, generate
from cacheblend_cli.engine.holes import has_holes, store_holes
from cacheblend_cli.engine.prefill import Prefilled, prefill
from cacheblend_cli.engine.request import Request, chunk_of
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.verify import verify


def ask(
    runtime: Runtime,
    request: Request,
    listener: Listener = NOBODY,
    wanted: AskOptions = DEFAULT_OPTIONS,
) -> Answer:
    """Answer the request. Blending never changes stored KV."""
    request, report = as_run(runtime, request, wanted)
    gate = Gate.of(request)
    done = prefill(runtime, request, room=runtime.room(request.sampling))
    try:
        first_logits = done.logits.clone() if wanted.verify else None
        shares = AttentionShares(runtime.decoder, done.plan)
        runner = runtime.decode_runner(done.pool, Watch([(shares, done.sequence)]))
        passes = None if gate is None else gated(runtime, gate, done)
        begin, sampling = Continuation.of(done), request.sampling
        generation = generate(runtime, begin, sampling, listener, runner=runner, passes=passes)
        confirmation = None
        if wanted.confirm:
            generation, confirmation = confirm(runtime, done, generation)
        generation.attention = shares.of_chunks()
        answer = answer_of(runtime, done, generation, report)
        answer.confirmation = confirmation
        answer.verify = None if first_logits is None else verify(runtime, done, first_logits)
        answer.risk = None if gate is None else gate.found
    finally:
        done.sequence.release()
    conclude(runtime, done, answer)
    if wanted.save_holes and has_holes(done):
        for _ in store_holes(done):
            pass
    return answer


def as_run(runtime: Runtime, request: Request, wanted: AskOptions) -> tuple[Request, AutoReport | None]:
    """The request as it is run: with a seed to confirm it by, and blended as the loading controller decides, if that is asked."""
    if wanted.confirm:
        request = seeded(request)
    return decided(runtime, request) if wanted.auto else (request, None)


def answer_of(runtime: Runtime, done: Prefilled, generation: Generation, report: AutoReport | None) -> Answer:
    """What there is to say of an answer, unless it is checked. done: the prompt, as it was run in the end."""
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
        prompt_tokens=plan.num_tokens,
        cached_tokens=plan.cached_tokens,
        exact_tokens=plan.exact_tokens,
        hot_tokens=done.hot_tokens,
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
        layers=done.result.layers,
        chosen=done.result.chosen.tolist(),
        auto=None if report is None else replace(report, ttft_s=ttft_s),
    )


def conclude(runtime: Runtime, done: Prefilled, answer: Answer) -> None:
    """Let the controller learn from the answer, and the store note what was used."""
    if answer.auto is not None and not done.hot_tokens:
        learn_from(runtime, answer.auto, done)
    request, store = done.request, done.request.store
    if store is not None and request.blend.mode != "full":  # before holes are stored, which may need room
        used = [s.key for s in done.plan.chunks if s.cached and s.key]
        store.touch([*used, request.collection.prefix_key] if request.prefix_cached else used)


def _chunk_uses(done: Prefilled, attention: list[float] | None) -> list[ChunkUse]:
    """attention: of each chunk its share, where that is known."""
    positions, store, uses = done.result.chosen.tolist(), done.request.store, list[ChunkUse]()
    citations = None if store is None else Citations(store)
    for i, segment in enumerate(done.plan.chunks):
        recomputed = sum(segment.start <= p < segment.end for p in positions)
        use = ChunkUse(
            id=segment.key.hex() if segment.key else "",
            source=segment.source,
            tokens=len(segment.token_ids),
            status=segment.status,
            recomputed=len(segment.token_ids) if segment.status == "computed" else recomputed,
            start=segment.start,
            attention=None if attention is None else round(attention[i], 4),
        )
        manifest = None if store is None or not segment.key else chunk_of(store, segment.key)
        if citations is not None and manifest is not None:
            cited = citations.of(manifest)
            use = replace(use, place=cited.locator.text, headings=cited.locator.headings)
        uses.append(use)
    return uses
