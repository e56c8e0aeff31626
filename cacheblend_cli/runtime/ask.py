"""ask: question + chunks -> prompt plan -> blocks -> KV loader -> blended prefill -> first token -> decode -> answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from cacheblend_store import BadBlob, ChunkManifest, ChunkStore
from torch import Tensor

from cacheblend_cli.blend.policy import BlendPolicy
from cacheblend_cli.blend.prefill import PrefillResult, blended_prefill
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.kv.loader import BadChunk, KVLoader
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput, PromptPlan, plan_prompt
from cacheblend_cli.runtime.answer import Answer, ChunkUse, Timing, Verification
from cacheblend_cli.runtime.config import BlendConfig
from cacheblend_cli.runtime.fidelity import divergence, log_distribution, teacher_forced
from cacheblend_cli.runtime.generate import generate
from cacheblend_cli.runtime.memory import DeviceMemory, new_sequence, out_of_memory, runner_of
from cacheblend_cli.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One question over resolved chunks. prefix_cached: the store has the prefix's KV. lossless: what is stored is
    what this run would compute."""

    suffix_ids: tuple[int, ...]
    chunks: tuple[ChunkInput, ...]
    blend: BlendConfig
    sampling: SamplingParams
    prefix_cached: bool
    lossless: bool = True


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV is in the pool. The caller releases the sequence."""

    plan: PromptPlan
    pool: KVPool
    sequence: PagedSequence
    result: PrefillResult
    loader: KVLoader
    prefill_s: float

    @property
    def recompute_fraction(self) -> float:
        """Fresh token-layers over layers x reusable tokens; 1 for a full prefill, which reuses nothing."""
        reusable = self.plan.cached_tokens
        return self.result.fresh_token_layers / (len(self.result.layers) * reusable) if reusable else 1.0


def resolve_chunks(
    model: LoadedModel,
    collection: Collection,
    store: ChunkStore | None,
    keys: Sequence[bytes],
    notes: list[str],
) -> tuple[ChunkInput, ...]:
    """The chunks as this model sees them.

    A chunk that is stored in another codec is loaded in it. One of another model or salt gives its text: what this model
    has of that text in the collection's codec is taken, and without any it is a hole. So is a chunk without KV. Raises
    NotFoundError for a chunk whose record is not there or damaged, UsageError when there is no store.
    """
    found: list[ChunkInput] = []
    for key in keys:
        if store is None:
            raise UsageError("chunks are named, and there is no store", "give --store")
        try:
            manifest = store.get_chunk(key)
        except BadBlob as error:
            raise NotFoundError(
                f"the record of chunk {key.hex()[:12]} is damaged: {error.message}",
                "run cacheblend precompute on its document again",
            ) from error
        if manifest is None:
            raise NotFoundError(f"no chunk {key.hex()[:12]} in the store", "list the ids: cacheblend chunks ls")
        found.append(_as_input(model, collection, store, manifest, notes))
    return tuple(found)


def _as_input(
    model: LoadedModel, collection: Collection, store: ChunkStore, manifest: ChunkManifest, notes: list[str]
) -> ChunkInput:
    if manifest.collection == replace(collection, codec=manifest.codec).id:
        return ChunkInput(
            manifest.key,
            manifest.source,
            manifest.token_ids,
            manifest.left_context_ids,
            cached=manifest.has_kv,
            same_regime=model.decoder.rope.regime(manifest.collected_len) == 0,
            codec=manifest.codec,
        )
    token_ids = tuple(model.tokenizer.encode_text(manifest.text))
    lefts = dict.fromkeys((manifest.left_context_ids, ()))  # the same context first
    own = [m for left in lefts if (m := store.get_chunk(collection.key(token_ids, left))) is not None]
    if own:
        return _as_input(model, collection, store, max(own, key=lambda m: m.has_kv), notes)
    notes.append(f"chunk {manifest.id[:12]} has no KV of this model in {collection.codec}: it is computed")
    return ChunkInput(collection.key(token_ids), manifest.source, token_ids, cached=False)


def prefill(
    model: LoadedModel,
    collection: Collection,
    store: ChunkStore | None,
    request: Request,
    block_size: int,
    notes: list[str],
    *,
    room: int = 0,
    output_positions: Callable[[PromptPlan], Tensor] | None = None,
    memory: DeviceMemory | None = None,
) -> Prefilled:
    """Lay the prompt out and fill its KV. A chunk whose stored KV is bad is computed instead, and a note says so.

    room: positions to keep free after the prompt. memory: a GPU's, else the prompt gets a pool of its own.
    Raises UsageError when the prompt is longer than the context, DeviceError when it does not fit the memory.
    """
    blend = request.blend
    while True:
        plan = plan_of(model, collection, request)
        check_length(model, plan.num_tokens, room)
        sequence = new_sequence(model.decoder, memory, plan.num_tokens + room, block_size)
        pool = sequence.pool
        try:
            policy = blend.policy(model.spec.num_layers, request.lossless)
            loader = KVLoader(model.decoder, store, pool, sequence, plan.segments, plan.num_tokens)
            positions = output_positions(plan) if output_positions else None
            start = time.perf_counter()
            with loader:
                result = _run(model, pool, sequence, plan, policy, loader, positions)
            return Prefilled(plan, pool, sequence, result, loader, time.perf_counter() - start)
        except BadChunk as bad:
            sequence.release()
            if bad.key == collection.prefix_key:
                request = replace(request, prefix_cached=False)
            chunks = tuple(replace(c, cached=False) if c.key == bad.key else c for c in request.chunks)
            request = replace(request, chunks=chunks)
            notes.append(f"stored KV {bad.key.hex()[:12]} is not used, it is computed: {bad.reason}")
        except torch.OutOfMemoryError as error:
            sequence.release()
            raise out_of_memory(error, model.decoder.device, plan.num_tokens, memory) from error
        except BaseException:
            sequence.release()
            raise


def answer(
    model: LoadedModel,
    collection: Collection,
    store: ChunkStore | None,
    request: Request,
    block_size: int,
    notes: list[str],
    started: float,
    model_load_s: float,
    on_text: Callable[[str], None] | None = None,
    verify: bool = False,
    memory: DeviceMemory | None = None,
) -> Answer:
    """The whole path. started: perf_counter when model and question were known."""
    done = prefill(
        model, collection, store, request, block_size, notes, room=request.sampling.max_tokens, memory=memory
    )
    logits = done.result.logits[-1]
    first_logits = logits.clone() if verify else None
    try:
        generation = generate(
            model.decoder, done.pool, done.sequence, done.plan.num_tokens, logits, model.tokenizer, model.eos_ids,
            request.sampling, on_text, runner_of(model.decoder, memory, done.pool),
        )  # fmt: skip
        ttft = generation.first_token_at - started
        verification = None
        if first_logits is not None:
            verification = _verify(model, collection, request, done, first_logits, block_size, memory)
    finally:
        done.sequence.release()
    plan, loader = done.plan, done.loader
    return Answer(
        text=generation.text,
        finish_reason=generation.finish_reason,
        model=model.name,
        mode=request.blend.mode,
        selector=request.blend.selector,
        ratio=request.blend.effective_ratio(),
        prompt_tokens=plan.num_tokens,
        cached_tokens=plan.cached_tokens,
        exact_tokens=plan.exact_tokens,
        recomputed_tokens=len(done.result.chosen),
        recompute_fraction=done.recompute_fraction,
        chunks=_chunk_uses(plan, done.result.chosen),
        timing=Timing(model_load_s, loader.load_s, loader.stall_s, done.prefill_s, ttft, generation.tokens_per_s),
        kv_bytes_loaded=loader.num_bytes,
        prompt_ids=plan.token_ids,
        generated_ids=generation.token_ids,
        verify=verification,
        logprobs=generation.logprobs,
        notes=notes,
        layers=done.result.layers,
    )


def check_length(model: LoadedModel, num_tokens: int, room: int) -> None:
    """Raises UsageError when prompt and answer do not fit the model's context."""
    limit = model.spec.max_position_embeddings
    if num_tokens + room > limit:
        raise UsageError(
            f"the prompt has {num_tokens} tokens and the answer up to {room}, and the context of {model.name} is {limit}",
            "ask with fewer chunks, a shorter question or a smaller --max-tokens",
        )


@torch.inference_mode()
def _run(
    model: LoadedModel,
    pool: KVPool,
    sequence: PagedSequence,
    plan: PromptPlan,
    policy: BlendPolicy,
    loader: KVLoader,
    positions: Tensor | None,
) -> PrefillResult:
    return blended_prefill(Prompt(model.decoder, plan, sequence, loader), policy, positions)


@torch.inference_mode()
def _verify(
    model: LoadedModel,
    collection: Collection,
    request: Request,
    done: Prefilled,
    logits: Tensor,
    block_size: int,
    memory: DeviceMemory | None,
) -> Verification:
    """Against a full prefill and its greedy answer. logits: fp32 [vocab_size] after the prompt of `done`."""
    start = time.perf_counter()
    room, blend = request.sampling.max_tokens, BlendConfig(mode="full")
    full = prefill(model, collection, None, replace(request, blend=blend), block_size, [], room=room, memory=memory)
    try:
        full.result.logits[-1].argmax().item()  # the first token is there, on a GPU too
        seconds = time.perf_counter() - start
        greedy = SamplingParams(max_tokens=room, stop=request.sampling.stop)
        answer_ids = generate(
            model.decoder, full.pool, full.sequence, full.plan.num_tokens, full.result.logits[-1], model.tokenizer,
            model.eos_ids, greedy, runner=runner_of(model.decoder, memory, full.pool),
        ).token_ids  # fmt: skip
        prompt_ids = full.plan.token_ids
        reference, ours = (teacher_forced(model.decoder, p.sequence, prompt_ids, answer_ids) for p in (full, done))
        reference[0], ours[0] = full.result.logits[-1], logits
    finally:
        full.sequence.release()
    found = divergence(log_distribution(reference), log_distribution(ours))
    return Verification(
        kl=found.kl[0],
        top1_agree=found.top1[0],
        full_ttft_s=seconds,
        answer_kl=found.mean_kl,
        answer_top1=found.top1_rate,
        answer_tokens=len(answer_ids),
        same_answer=found.first_difference is None,
    )


def plan_of(model: LoadedModel, collection: Collection, request: Request) -> PromptPlan:
    """The request's prompt, laid out."""
    short = _short_regime(model, collection, request)
    return plan_prompt(
        collection.prefix_ids,
        [replace(c, same_regime=c.same_regime and short) for c in request.chunks],
        request.suffix_ids,
        prefix_key=collection.prefix_key if request.prefix_cached and short else None,
        reuse=request.blend.mode != "full",
    )


def _short_regime(model: LoadedModel, collection: Collection, request: Request) -> bool:
    """Whether the prompt gets the RoPE frequencies chunks are collected under. If not, nothing stored is exact in it."""
    total = len(collection.prefix_ids) + sum(len(c.token_ids) for c in request.chunks) + len(request.suffix_ids)
    return model.decoder.rope.regime(total) == 0


def _chunk_uses(plan: PromptPlan, chosen: Tensor) -> list[ChunkUse]:
    positions = chosen.tolist()
    out = []
    for segment in plan.chunks:
        count = sum(segment.start <= p < segment.end for p in positions)
        if segment.status == "computed":
            count = len(segment.token_ids)
        key = segment.key.hex() if segment.key else ""
        out.append(ChunkUse(key, segment.source, len(segment.token_ids), segment.status, count))
    return out
