"""`--confirm`: the answer a full prefill gives, at the price of little more than that prefill where it is the same.

What was streamed from blended KV is a draft. The full prefill's logits for all of its tokens come from one pass, as in
speculative decoding (arXiv 2211.17192), and the sampler draws from them with the draft's own seed. From the first token that
is another, the answer goes on from the full prefill's KV.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cacheblend_cli.engine.answer import Confirmation
from cacheblend_cli.engine.decode import DecodeRunner
from cacheblend_cli.engine.fidelity import teacher_forced
from cacheblend_cli.engine.generate import Continuation, Generation, generate
from cacheblend_cli.engine.prefill import Prefilled, prefill
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.pool import PagedSequence


@torch.inference_mode()
def confirm(
    runtime: Runtime,
    done: Prefilled,
    draft: Generation,
    leave: Callable[[PagedSequence, list[int]], None] | None = None,
) -> tuple[Generation, Confirmation]:
    """The answer a full prefill of the same prompt gives, and how the draft compares with it.

    The request's sampling has to have a seed, or to be greedy: the draft was drawn with it. leave: given the exact KV in the
    end, and its tokens, before it is let go of.
    """
    sampling, start = done.request.sampling, time.perf_counter()
    if not (done.plan.cached_tokens or done.hot_tokens):  # it was one
        return draft, Confirmation(True, None, draft.text, 0.0, 0.0)
    full = prefill(runtime, done.request.in_full(), room=runtime.room(sampling))
    try:
        full.logits.argmax().item()  # the first token is there, on a GPU too
        full_ttft_s = time.perf_counter() - start
        logits = teacher_forced(runtime.decoder, full.sequence, full.plan.token_ids, draft.token_ids)
        runner = AfterDraft(logits, draft.token_ids, runtime.decode_runner(full.sequence.pool))
        answer = generate(runtime, Continuation.of(full), sampling, runner=runner, ahead=False)
        if leave is not None:
            leave(full.sequence, [*full.plan.token_ids, *answer.token_ids[:-1]])
    finally:
        full.sequence.release()
    pairs = zip(answer.token_ids, draft.token_ids, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(answer.token_ids), len(draft.token_ids)))
    same = answer.token_ids == draft.token_ids
    answer.first_token_at, answer.decode_s = draft.first_token_at, draft.decode_s  # what the user waited for
    return answer, Confirmation(same, None if same else common, draft.text, full_ttft_s, time.perf_counter() - start)


def seeded(request: Request) -> Request:
    """The request with a seed, where tokens are drawn at random: so they can be drawn again."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(32)))


class AfterDraft:
    """Decodes one sequence behind a draft's tokens: as long as they are what is drawn, their logits are there already.

    logits: fp32 [num_tokens, vocab_size], what predicts each of the draft's ids; the KV of all but the last is written.
    """

    def __init__(self, logits: Tensor, draft_ids: Sequence[int], runner: DecodeRunner) -> None:
        self._logits, self._draft_ids, self._runner = logits, draft_ids, runner
        self._drawn, self._follows = 0, True

    def begin(self, sequences: Sequence[PagedSequence], kv_lens: Sequence[int], room: int) -> None:
        self._sequences, self._kv_lens, self._room = sequences, kv_lens, room

    def step(self, tokens: Tensor) -> Tensor:
        if self._follows:
            at = self._drawn
            self._drawn += 1
            if self._drawn < len(self._draft_ids) and int(tokens) == self._draft_ids[at]:
                return self._logits[self._drawn : self._drawn + 1]
            self._follows = False
            self._runner.begin(self._sequences, [n + at for n in self._kv_lens], self._room - at)
        return self._runner.step(tokens)
