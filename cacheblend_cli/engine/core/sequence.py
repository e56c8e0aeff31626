"""State of a request in the engine: its answers, and the blocks and KV of each."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.events import Early
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.worker.worker import Worker
from cacheblend_cli.kv.block_table import BlockTable
from cacheblend_cli.kv.prefix_cache import KVProvenance


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # has blocks: its prompt is being prefilled, or it decodes
    SWAPPED = "swapped"  # preempted, its KV is on the host
    FINISHED = "finished"


@dataclass(eq=False)
class RunningPrefill:
    """A prompt being computed by a worker."""

    worker: Worker
    number: int  # the worker's key for it
    hit_tokens: int  # leading tokens whose KV came from the prefix cache
    short: int | None = None  # rows, if it may share a launch with other prompts
    launch: int | None = None  # key of its launch's first prompt, once that has begun


@dataclass(frozen=True)
class SwappedKV:
    """KV of a preempted sequence on the host."""

    worker: Worker
    number: int  # the worker's key for it
    num_blocks: int
    num_freed_blocks: int  # leading blocks that the sequence had already given back


@dataclass(eq=False)
class Sequence:
    """One answer of a request. Of answers that start together, the first prefills the prompt, the others fork it."""

    state: RequestState
    index: int  # of the answer
    status: SequenceStatus = SequenceStatus.WAITING
    paged: BlockTable | None = None  # its blocks while it runs
    kv_len: int = 0  # tokens with KV in the blocks: all but the newest
    prefill: RunningPrefill | None = None  # while the prompt is computed
    output: SequenceOutput | None = None  # the answer, once it has a token
    swapped: SwappedKV | None = None
    replay: int = 0  # further tokens whose dropped KV is computed again; they are not drawn again

    @property
    def prefilling(self) -> bool:
        return self.status is SequenceStatus.RUNNING and self.prefill is not None

    @property
    def next_token(self) -> int:
        """Token whose KV is computed next: the newest, except in a replay."""
        assert self.output is not None
        return self.output.out.token_ids[-1 - self.replay]

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens after the prompt that need blocks at its start."""
        return 1 if self.output is None else len(self.output.out.token_ids) + 1

    def watches(self, place: int) -> bool:
        """Return whether a hook takes the attention of the token at position `place`."""
        num_tokens = place - self.state.num_tokens
        return not self.replay and any(hook.watches(self.index, num_tokens) for hook in self.state.hooks)

    def stop_prefill(self) -> None:
        if self.prefill is not None:
            self.prefill.worker.end(self.prefill.number)
        self.prefill = None

    def release(self, status: SequenceStatus) -> None:
        self.stop_prefill()
        if self.paged is not None:
            self.paged.release()
        if self.swapped is not None:
            self.swapped.worker.forget(self.swapped.number)
        self.paged, self.swapped, self.status = None, None, status


Drafts = dict[Sequence, tuple[int, ...]]
"""Proposed tokens of each sequence that has any, in order."""


@dataclass(eq=False)
class RequestState:
    """A submitted request and its answers."""

    request: Request  # as it is run now
    number: int  # order of arrival
    parent: RequestState | None = None  # the request that this one is run for
    submitted: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    begun: bool = False  # it has left the queue at least once
    in_review: bool = False  # it waits for hooks' work in another thread
    max_new_tokens: int = 0  # maximum tokens of an answer, with its reasoning
    num_answer_tokens: int = 0  # at the end of the prompt of a further request
    hooks: list[Hook] = field(default_factory=list)
    provenance: KVProvenance | None = None  # of its prompt's KV, once it is queued
    sequences: list[Sequence] = field(default_factory=list)
    done: PrefillReport | None = None  # of its prompt, once prefilled

    @property
    def ended(self) -> Early | None:
        """Return the reason to end the request early, or None."""
        if self.parent is not None:
            return self.parent.ended
        if self.in_review:  # which ends soon, also if it is cancelled
            return None
        if self.cancelled:
            return "cancelled"
        limit_s = self.request.options.deadline_s
        return "deadline" if limit_s is not None and time.monotonic() - self.submitted >= limit_s else None

    @property
    def turn(self) -> tuple[int, int, bool]:
        """Sort key: priority, then arrival."""
        return self.request.options.priority, self.number, self.parent is not None

    @property
    def num_answers(self) -> int:
        """Number of answers to generate, of which `sampling.n` are returned."""
        return max(self.request.sampling.n, self.request.sampling.best_of)

    @property
    def outputs(self) -> list[SequenceOutput]:
        """Outputs of the answers that have begun."""
        return [sequence.output for sequence in self.sequences if sequence.output is not None]

    @property
    def num_started(self) -> int:
        return len(self.outputs)

    @property
    def streams(self) -> bool:
        """Return whether tokens are emitted as they are drawn: not if the likeliest answers are chosen at the end, or a
        hook judges the answer."""
        return self.num_answers <= self.request.sampling.n and not any(hook.holds_back for hook in self.hooks)

    @property
    def outputs_from(self) -> int | None:
        """Return the first position of the prompt whose logits a hook takes, None for the last position only."""
        return min((hook.outputs_from for hook in self.hooks if hook.outputs_from is not None), default=None)

    @property
    def num_tokens(self) -> int:
        return self.request.plan.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens (num_tokens of a further request also counts an answer's)."""
        return self.num_tokens - self.num_answer_tokens

    @property
    def unfinished(self) -> Iterator[Sequence]:
        return (s for s in self.sequences if s.status is not SequenceStatus.FINISHED)


def provenance_of(state: RequestState, slice_rows: int) -> KVProvenance:
    """Return the provenance of a prompt's KV: the stored KV in each whole slice of slice_rows positions before the
    first chunk that needs repair."""
    request, plan, slices = state.request, state.request.plan, []
    for start in range(0, min(plan.exact_until, state.num_prompt_tokens) - slice_rows + 1, slice_rows):
        end = start + slice_rows
        stored = [
            (s.start, s.end, s.key, s.codec) for s in plan.segments if s.cached and s.start < end and s.end > start
        ]
        if plan.in_order:  # slices end where segments do
            stored += [(s.start, s.start, None, "") for s in plan.segments if start < s.start < end]
        slices.append(hashlib.blake2b(repr((slice_rows, stored)).encode(), digest_size=16).digest())
    root = hashlib.blake2b(request.collection.salt.encode(), digest_size=16).digest()
    return KVProvenance(root, tuple(slices), slice_rows)
