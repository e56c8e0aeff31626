"""Measure the ratio that a model needs: blending against full prefill, on the user's stored chunks with general
questions or the user's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, quantiles, stdev

import torch
from cacheblend_store import ChunkStore
from torch import Tensor

from cacheblend_cli.blend.fidelity import divergence, log_distribution
from cacheblend_cli.corpus.ranking import sentences_of
from cacheblend_cli.engine.engine import Engine, Request
from cacheblend_cli.engine.profile import Distance, Profile, conditions, stored_codec
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

RATIOS = (0.05, 0.10, 0.15, 0.30, 0.50)
CORRECTIONS = ("regression", "none")
PROMPTS, LEAST_PROMPTS = 12, 8
TOKENS = 32  # of full prefill's answer
TRIES = 16  # maximum chunks tried per prompt
SENTENCE = (40, 400)  # characters of a sentence used as the search query
GENERAL = (
    "What do these documents say?",
    "Summarise these documents in one sentence.",
    "What are the most important facts in these documents?",
)
"""Questions of a profile, in turn. They do not say which tokens their answers need, so blending is farther off than
on half sentences (study/own_ratio.md)."""

Progress = Callable[[int, int, str], None]
"""Called with (steps done, number of steps at most, what is measured)."""


@dataclass(frozen=True)
class FullAnswer:
    """Full prefill's greedy answer."""

    token_ids: list[int]
    log_p: Tensor  # log-probabilities that predict them, fp32 [num_tokens, vocab_size] on the CPU
    seconds: float  # prefill and answer


def check_blends(engine: Engine) -> None:
    """Raise NotFoundError for a model whose KV is never blended."""
    if engine.model.spec.recurrent:
        reason = "has recurrent layers: nothing is blended, so there is nothing to measure"
        raise NotFoundError(f"{engine.model.name} {reason}", "ask --verify compares an answer with a full prefill")


def p90_limit(kl_mean: float) -> float:
    """Return the limit of the 90th percentile that belongs to a limit of the mean."""
    return kl_mean * 8 / 3


def measure_profile(
    engine: Engine,
    store: ChunkStore,
    ask: AskRequest,
    kl_mean: float,
    questions: Sequence[str] = (),
    *,
    say: Callable[[str], None] = lambda text: None,
    on_progress: Progress = lambda done, total, text: None,
) -> Profile:
    """Measure rising ratios, each with and without a correction, until mean and 90th percentile of the KL are within
    the limits. Stores nothing.

    ask: search parameters and blending, except for the ratio. kl_mean: limit of the mean, see `p90_limit`. questions:
    questions to use instead of general ones. say: called with the maximum duration. Raises NotFoundError for too few
    prompts.
    """
    check_blends(engine)
    asked = _found_for(engine, store, ask, questions) if questions else general_requests(engine, store, ask)
    requests = list(usable(engine, asked, len(questions) or PROMPTS))
    if len(requests) < LEAST_PROMPTS:
        raise NotFoundError(
            f"too few {'questions' if questions else 'chunks'} to measure a ratio of {engine.model.name}: {LEAST_PROMPTS} prompts with "
            f"stored KV that needs repair are required, {len(requests)} were found",
            "precompute more documents with this model" + (", or ask more questions" if questions else ""),
        )
    under = conditions(requests[0].collection, stored_codec(requests[0].inputs, requests[0].collection), ask.blend)
    corrections = CORRECTIONS if ask.blend.correction == BlendParams.correction else (ask.blend.correction,)
    steps, answers = len(requests) * (1 + len(RATIOS) * len(corrections)), list[FullAnswer]()
    for number, request in enumerate(requests):
        answers.append(full_answer(engine, request))
        if number == 0:
            seconds = answers[0].seconds * len(requests) * (1 + sum(r + 0.15 for r in RATIOS) * len(corrections))
            say(
                f"measuring {engine.model.name} on {len(requests)} questions{'' if questions else ' about stored chunks'}: up to "
                f"{max(1, round(seconds / 60))} min; Ctrl-C keeps nothing"
            )
        on_progress(number + 1, steps, "full prefill")
    found = list[Distance]()
    for ratio in RATIOS:
        for correction in corrections:
            blend, kl = replace(ask.blend, ratio=ratio, correction=correction), list[float]()
            for request, answer in zip(requests, answers, strict=True):
                kl.append(distance(engine, replace(request, blend=blend), answer))
                on_progress(len(requests) * (1 + len(found)) + len(kl), steps, f"ratio {ratio:g}, {correction}")
            found.append(distance_of(ratio, correction, kl))
        profile = Profile(under, len(requests), kl_mean, p90_limit(kl_mean), tuple(found))
        if profile.choice is not None:
            break
    return profile


def distance_of(ratio: float, correction: str, kl: Sequence[float]) -> Distance:
    """Summarise the KL of two or more prompts."""
    p90 = quantiles(kl, n=10, method="inclusive")[-1]
    return Distance(ratio, correction, fmean(kl), stdev(kl) / math.sqrt(len(kl)), p90)


def half_sentence(text: str) -> str | None:
    """Return the first half of the middle one of the text's long sentences; None without one."""
    found = [s for s in sentences_of(text) if SENTENCE[0] <= len(s) <= SENTENCE[1]]
    if not found:
        return None
    sentence = found[len(found) // 2]
    half = sentence[: len(sentence) // 2]
    return f"{half.rpartition(' ')[0] or half} ..."


def general_requests(engine: Engine, store: ChunkStore, ask: AskRequest) -> Iterator[Request]:
    """Yield requests over stored chunks: each has a general question, and the chunks that the search of `ask` finds for
    half a sentence of a chunk. Keys are digests, so their order is random."""
    collections, number = set(engine.usable(store, ask.salt)), 0
    chunks = (m for m in store.chunks() if m.has_kv and m.collection in collections)
    for own in islice(chunks, PROMPTS * TRIES):
        if (half := half_sentence(own.text)) is None:
            continue
        keys = engine.search(store, replace(ask, question=half)).keys
        question, number = GENERAL[number % len(GENERAL)], number + 1
        yield engine.resolve(store, replace(ask, question=question, keys=keys, search=None, options=AskOptions()))


def _found_for(engine: Engine, store: ChunkStore, ask: AskRequest, questions: Sequence[str]) -> Iterator[Request]:
    """Yield the questions' requests as `ask` resolves them, except if nothing is found."""
    for question in questions:
        with suppress(NotFoundError):
            yield engine.resolve(store, replace(ask, question=question, options=AskOptions()))


def usable(engine: Engine, requests: Iterable[Request], most: int) -> Iterator[Request]:
    """Yield a limited number of requests whose KV is all stored, in the first one's codec, and not all exact."""
    codec, count = None, 0
    for request in requests:
        stored_as = stored_codec(request.inputs, request.collection)
        codec = codec or stored_as
        whole = stored_as == codec and all(s.cached for s in request.plan.chunks)
        if whole and request.plan.inexact_tokens and request.plan.num_tokens + TOKENS <= engine.context:
            yield request
            count += 1
        if count == most:
            return


@torch.inference_mode()
def full_answer(engine: Engine, request: Request) -> FullAnswer:
    start = time.perf_counter()
    done = engine.hold_prefill(request.in_full(), headroom=TOKENS)
    token_ids = done.answer(SamplingParams(max_tokens=TOKENS, stop_repetition=False)).token_ids
    logits = done.predict(token_ids)
    done.sequence.release()
    return FullAnswer(token_ids, log_distribution(logits).float().cpu(), time.perf_counter() - start)


@torch.no_grad()  # not inference_mode: the loader's threads write into the pool made here
def distance(engine: Engine, request: Request, full: FullAnswer) -> float:
    """Return KL(full || blended) over full prefill's answer, mean nats a token."""
    done = engine.hold_prefill(request, headroom=TOKENS)
    logits = done.predict(full.token_ids)
    done.sequence.release()
    return divergence(full.log_p.double(), log_distribution(logits).cpu()).mean_kl
