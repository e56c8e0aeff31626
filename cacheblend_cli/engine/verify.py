"""`--verify`: how far a prompt's KV is from a full prefill of the same ids."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from cacheblend_cli.engine.answer import Verification
from cacheblend_cli.engine.fidelity import divergence, log_distribution, teacher_forced
from cacheblend_cli.engine.generate import Continuation, generate
from cacheblend_cli.engine.prefill import Prefilled, prefill
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import SamplingParams


@torch.inference_mode()
def verify(runtime: Runtime, done: Prefilled, logits: Tensor) -> Verification:
    """Against a full prefill and its greedy answer. logits: fp32 [vocab_size], what `done` predicted after the prompt."""
    start = time.perf_counter()
    sampling = done.request.sampling
    full = prefill(runtime, done.request.in_full(), room=sampling.max_tokens)
    try:
        full.logits.argmax().item()  # the first token is there, on a GPU too
        seconds = time.perf_counter() - start
        greedy = SamplingParams(max_tokens=sampling.max_tokens, stop=sampling.stop)
        answer_ids = generate(runtime, Continuation.of(full), greedy).token_ids
        prompt_ids = full.plan.token_ids
        reference, ours = (teacher_forced(runtime.decoder, p.sequence, prompt_ids, answer_ids) for p in (full, done))
        reference[0], ours[0] = full.logits, logits
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
        first_difference=found.first_difference,
    )
