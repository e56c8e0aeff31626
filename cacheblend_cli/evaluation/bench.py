"""Measurements of `cacheblend bench`: settings in turn over one prompt of random ids, each against a full prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from cacheblend_store import StoreNoSpace

from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.profile import check_blends
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.speed import (
    FirstToken,
    PromptLayout,
    SpeedPrompt,
    ceiling,
    device_name,
    even_lengths,
    in_turn,
    ordinary_ids,
    random_ids,
)
from cacheblend_cli.evaluation.temporary import temporary_store

DEFAULT_TOKENS = 2048
_DECODE = "decode"


@dataclass(frozen=True)
class Speed:
    """Medians of one setting over the rounds. ttft_s and kv_load_*: see `FirstToken`."""

    setting: str
    mode: str
    selector: str | None
    ratio: float
    ttft_s: float
    all_ttft_s: list[float]
    speedup: float  # full prefill's ttft_s divided by this one's
    ceiling: float  # the cost model's limit
    measured_over_ceiling: float
    kv_bytes_loaded: int
    kv_load_s: float
    kv_load_stall_s: float
    load_bytes_per_s: float | None  # None if nothing is loaded


@dataclass(frozen=True)
class BenchReport:
    """Measurements with their machine and prompt. Tokens are counts, *_s seconds; collect_s is collecting and
    storing."""

    model: str
    device: str
    device_name: str
    threads: int
    dtype: str
    attention_backend: str
    kv_dtype: str
    layers: int
    prompt_tokens: int
    prefix_tokens: int
    chunk_tokens: list[int]
    question_tokens: int
    suffix_tokens: int
    decode_tokens: int
    rounds: int
    collect_s: float
    full_prefill_s: float
    decode_tokens_per_s: float
    settings: list[Speed]
    notes: list[str]


def layout_of(engine: Engine, tokens: int | None, chunks: int, question_tokens: int, headroom: int) -> PromptLayout:
    """Return a prompt of random ids within the model's template. tokens: of all chunks, None for as many as fit up to
    DEFAULT_TOKENS, a multiple of `chunks`. Raises UsageError if the prompt and `headroom` tokens after it do not fit
    the model's context."""
    generator, ordinary = torch.Generator().manual_seed(0), ordinary_ids(engine.model)
    template = engine.template
    suffix = (
        *template.tokenizer.encode_template_rest(template.before_question),
        *random_ids(ordinary, question_tokens, generator),
        *template.tokenizer.encode_template_rest(template.after_question),
    )
    context = engine.context
    around = len(template.prefix_ids) + len(suffix)
    fits = context - around - headroom
    wanted = tokens or max(chunks, min(DEFAULT_TOKENS, fits) // chunks * chunks)
    if wanted > fits:
        some = f"--tokens {fits} fits" if fits > 0 else "nothing fits: use fewer --question-tokens, --decode-tokens"
        raise UsageError(
            f"{wanted} chunk tokens, {around} around them and {headroom} decoded exceed the context of {engine.model.name} "
            f"({context} tokens)",
            some if fits <= 0 or fits >= chunks else f"{some}, with fewer --chunks",
        )
    if wanted < chunks:
        raise UsageError(
            f"--tokens {wanted} cannot be {chunks} chunks", "a chunk has at least one token: use fewer --chunks"
        )
    lengths = even_lengths(wanted, chunks)
    return PromptLayout(tuple(random_ids(ordinary, length, generator) for length in lengths), suffix, question_tokens)


def bench(
    engine: Engine,
    settings: Sequence[Setting],
    layout: PromptLayout,
    *,
    rounds: int,
    decode_tokens: int,
    on_run: Callable[[int, int, str], None],
) -> BenchReport:
    """Collect the chunks into a temporary store, then run every setting and a decode once per round. settings: a full
    prefill first. Raises UsageError for a setting that the model cannot run, StoreNoSpace if the disk of the system's
    temporary folder is too small."""
    check_blends(engine)
    model, decoder = engine.model, engine.model.decoder
    for setting in settings:
        policy_of(setting.blend, model.spec.num_kv_layers, True)  # refused before anything is computed
    engine.reserve_memory()
    collection = engine.collection(None)
    try:
        with temporary_store("bench") as store:
            on_run(0, (rounds + 1) * (len(settings) + 1), "collect")
            start = time.perf_counter()
            prompt = SpeedPrompt.stored(engine, store, layout, decode_tokens)
            collect_s = time.perf_counter() - start
            cases: dict[str, Callable[[], FirstToken | float]] = {
                s.label: partial(prompt.first_token, s.blend) for s in settings
            }
            cases[_DECODE] = partial(prompt.decode, decode_tokens)
            found = in_turn(cases, rounds, on_run)
    except StoreNoSpace as error:
        hint = "free some space, use fewer --tokens, or set TMPDIR to a folder on a larger disk"
        raise StoreNoSpace(error.message, hint) from error
    runs = {s.label: [r for r in found[s.label] if isinstance(r, FirstToken)] for s in settings}
    full_s = median(r.seconds for r in runs[settings[0].label])
    plan = prompt.plan(settings[0].blend)
    return BenchReport(
        model=model.name,
        device=str(decoder.device),
        device_name=device_name(decoder.device),
        threads=torch.get_num_threads(),
        dtype=str(decoder.dtype).removeprefix("torch."),
        attention_backend=decoder.kernels.name,
        kv_dtype=collection.codec,
        layers=model.spec.num_layers,
        prompt_tokens=plan.num_tokens,
        prefix_tokens=len(collection.prefix_ids),
        chunk_tokens=[len(ids) for ids in layout.chunks],
        question_tokens=layout.question_tokens,
        suffix_tokens=len(layout.suffix_ids),
        decode_tokens=decode_tokens,
        rounds=rounds,
        collect_s=collect_s,
        full_prefill_s=full_s,
        decode_tokens_per_s=median(r for r in found[_DECODE] if isinstance(r, float)),
        settings=[_speed(prompt, setting, runs[setting.label], full_s) for setting in settings],
        notes=prompt.request.notes,
    )


def _speed(prompt: SpeedPrompt, setting: Setting, runs: Sequence[FirstToken], full_s: float) -> Speed:
    blend = setting.blend
    ttft_s, load_s = median(r.seconds for r in runs), median(r.load_s for r in runs)
    top = ceiling(prompt.plan(blend), prompt.engine.model.spec.num_kv_layers, blend)
    return Speed(
        setting=setting.label,
        mode=blend.mode,
        selector=blend.selector if blend.mode == "blend" else None,
        ratio=blend.effective_ratio(),
        ttft_s=ttft_s,
        all_ttft_s=[r.seconds for r in runs],
        speedup=full_s / ttft_s,
        ceiling=top,
        measured_over_ceiling=full_s / ttft_s / top,
        kv_bytes_loaded=runs[-1].kv_bytes,
        kv_load_s=load_s,
        kv_load_stall_s=median(r.stall_s for r in runs),
        load_bytes_per_s=runs[-1].kv_bytes / load_s if runs[-1].kv_bytes else None,
    )
