"""ask: request -> prompt plan -> blocks -> KV loader -> blended prefill -> first token -> decode -> answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cacheblend_cli.corpus.citations import Citations
from cacheblend_cli.runtime.answer import Answer, Checks, ChunkUse, Timing
from cacheblend_cli.runtime.attention import AttentionShares, Watch
from cacheblend_cli.runtime.clock import since_process_start
from cacheblend_cli.runtime.config import DEFAULT_OPTIONS, AskOptions
from cacheblend_cli.runtime.confirm import confirm, seeded
from cacheblend_cli.runtime.controller import AutoReport, Observed, controller_of, decided
from cacheblend_cli.runtime.decode import DecodeRunner, EagerRunner
from cacheblend_cli.runtime.gate import Gate, GatedRunner
from cacheblend_cli.runtime.generate import NOBODY, Continuation, Generation, Listener, generate
from cacheblend_cli.runtime.holes import store_holes
from cacheblend_cli.runtime.prefill import Prefilled, prefill
from cacheblend_cli.runtime.request import Request, chunk_of
from cacheblend_cli.runtime.runtime import Runtime
from cacheblend_cli.runtime.verify import verify


def ask(
    runtime: Runtime,
    request: Request,
    listener: Listener = NOBODY,
    wanted: AskOptions = DEFAULT_OPTIONS,
) -> Answer:
    """Answer the request. Blending never changes stored KV."""
    asking = Asking.of(runtime, seeded(request) if wanted.confirm else request, wanted.auto)
    gate = Gate.of(asking.request)
    done = prefill(runtime, asking.request, room=runtime.room(request.sampling))
    try:
        first_logits = done.logits.clone() if wanted.verify else None
        runner: DecodeRunner
        runner, shares = runtime.decode_runner(done.pool), AttentionShares(runtime.decoder, done.plan)
        if isinstance(runner, EagerRunner):
            runner = EagerRunner(runtime.decoder, done.pool, Watch([(shares, done.sequence)]))
        begin = Continuation.of(done)
        if gate is not None:
            runner = GatedRunner(runtime, gate, done, runner)
            begin = replace(begin, logits=runner.first())
        ahead = None if gate is None else False  # a token that is drawn is one that is said
        generation = generate(runtime, begin, asking.request.sampling, listener, runner=runner, ahead=ahead)
        confirmation = None
        if wanted.confirm:
            generation, confirmation = confirm(runtime, done, generation)
        generation.attention = shares.of_chunks()
        verification = verify(runtime, done, first_logits) if first_logits is not None else None
    finally:
        done.sequence.release()
    answer = asking.answer(done, generation, Checks(verification, confirmation, None if gate is None else gate.found))
    asking.end(done, answer, save_holes=wanted.save_holes)
    return answer


@dataclass(frozen=True)
class Asking:
    """A request on its way. wanted: as it was asked; request: as it is run, where the loading controller decides; report: what
    that decided."""

    runtime: Runtime
    wanted: Request
    request: Request
    report: AutoReport | None = None

    @classmethod
    def of(cls, runtime: Runtime, request: Request, auto: bool) -> Asking:
        if not auto or request.blend.mode != "blend":
            return cls(runtime, request, request)
        return cls(runtime, request, *_decided(runtime, request))

    def answer(self, done: Prefilled, generation: Generation, checks: Checks) -> Answer:
        """What there is to say of it. done: the prompt, as it was run in the end."""
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
            model=self.runtime.model.name,
            mode=request.blend.mode,
            selector=request.blend.selector,
            ratio=request.blend.effective_ratio(),
            prompt_tokens=plan.num_tokens,
            cached_tokens=plan.cached_tokens,
            exact_tokens=plan.exact_tokens,
            hot_tokens=done.hot_tokens,
            recomputed_tokens=len(done.result.chosen),
            recompute_fraction=done.recompute_fraction,
            chunks=_chunk_uses(done, generation.attention or [None] * len(plan.chunks)),
            timing=Timing(
                process_s=since_process_start(generation.first_token_at),
                model_load_s=self.runtime.load_s,
                kv_load_s=loader.load_s,
                kv_load_stall_s=loader.stall_s,
                prefill_s=done.prefill_s,
                ttft_s=ttft_s,
                decode_tokens_per_s=generation.tokens_per_s,
            ),
            kv_bytes_loaded=loader.num_bytes,
            prompt_ids=plan.token_ids,
            generated_ids=generation.token_ids,
            verify=checks.verification,
            confirmation=checks.confirmation,
            risk=checks.risk,
            logprobs=generation.logprobs,
            prompt_logprobs=list(done.prompt_logprobs),
            notes=request.notes,
            layers=done.result.layers,
            chosen=done.result.chosen.tolist(),
            auto=None if self.report is None else replace(self.report, ttft_s=ttft_s),
        )

    def end(self, done: Prefilled, answer: Answer, *, save_holes: bool) -> None:
        """What is done once the answer is there: the controller learns, the store is told what was used and gets what it lacks."""
        if self.report is not None and not done.hot_tokens:
            seen = Observed.of_answer(answer, self.report.before_s, self.runtime.decoder.device.type)
            controller_of(self.runtime, self.wanted).learn(self.report, self.wanted, seen)
        request, store = done.request, done.request.store
        if store is not None and request.blend.mode != "full":  # before holes are stored, which may need room
            used = [s.key for s in done.plan.chunks if s.cached and s.key]
            store.touch([*used, request.collection.prefix_key] if request.prefix_cached else used)
        if save_holes:
            store_holes(done)


def _decided(runtime: Runtime, request: Request) -> tuple[Request, AutoReport]:
    """The request as the controller wants it."""
    resolved = time.perf_counter()
    controller = controller_of(runtime, request)
    controller.ready(request)
    started = request.started + time.perf_counter() - resolved  # measuring this machine, once, is no part of an answer
    report = controller.decide(request, time.perf_counter() - started)
    return replace(request, blend=decided(request.blend, report.decision), started=started), report


def _chunk_uses(done: Prefilled, attention: Sequence[float | None]) -> list[ChunkUse]:
    positions = done.result.chosen.tolist()
    store = done.request.store
    citations = None if store is None else Citations(store)
    out = []
    for segment, share in zip(done.plan.chunks, attention, strict=True):
        count = sum(segment.start <= p < segment.end for p in positions)
        if segment.status == "computed":
            count = len(segment.token_ids)
        key = segment.key.hex() if segment.key else ""
        use = ChunkUse(key, segment.source, len(segment.token_ids), segment.status, count, start=segment.start)
        if share is not None:
            use = replace(use, attention=round(share, 4))
        manifest = None if store is None or not segment.key else chunk_of(store, segment.key)
        if citations is not None and manifest is not None:
            cited = citations.of(manifest)
            use = replace(use, place=cited.locator.text, headings=cited.locator.headings)
        out.append(use)
    return out
