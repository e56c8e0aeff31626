"""Scheduling policy, all of it.

Requests are served by priority, then first come, first served. Preempted sequences resume before a new one begins. One
prompt is prefilled at a time, and between two steps of it every running answer gets a token; on a GPU a step ends
before a layer whose stored KV is not read yet. Consecutive short prompts share a launch, up to the rows of a slice. The
next prompt may load meanwhile. If blocks run out, the sequence that came last is preempted. Cancelled and overdue
requests end in a separate step.

With async scheduling (on a GPU) a step that only decodes the same answers again is scheduled before the host knows the
tokens of the last one (`schedule_ahead`). Any other step is scheduled after these tokens have taken effect.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Protocol

from cacheblend_cli.engine.core.block_manager import BlockManager
from cacheblend_cli.engine.core.sequence import (
    Drafts,
    RequestState,
    RunningPrefill,
    Sequence,
    SequenceStatus,
    SwappedKV,
    provenance_of,
)
from cacheblend_cli.engine.events import EngineStats
from cacheblend_cli.engine.worker.prefill import short_rows
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.engine.worker.worker import Swap, Worker
from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.block_table import BlockTable
from cacheblend_cli.kv.prefix_cache import PrefixHit


@dataclass
class Step:
    """The work of one step, in this order."""

    end: list[RequestState] = field(default_factory=list)  # cancelled or overdue
    swaps: list[Swap] = field(default_factory=list)  # KV moved to the host and back
    begin: list[Sequence] = field(default_factory=list)  # prompts whose stored KV begins to load
    prefill: list[Sequence] = field(default_factory=list)  # prompts whose next layers are computed, in one launch
    prefill_s: float = inf  # maximum seconds of it, unless one layer takes longer
    waits: bool = True  # the prefill waits for stored KV; else it ends before a layer whose KV is not read yet
    decode: list[Sequence] = field(default_factory=list)  # answers that get a token
    pending: Mapping[Sequence, Draw] = field(default_factory=dict)  # newest tokens that the host does not know yet
    drafts: Drafts = field(default_factory=dict)  # proposals of answers that get a token

    @property
    def num_rows(self) -> int:
        """Number of rows that are decoded if the step does nothing else, else 0."""
        if self.end or self.swaps or self.begin or self.prefill:
            return 0
        return len(self.decode) + sum(map(len, self.drafts.values()))


class Proposer(Protocol):
    """Proposes tokens, which a decode step computes, too."""

    def drafts(self, sequences: list[Sequence]) -> Drafts:
        """Return the proposals of a step that decodes these sequences."""
        ...

    def record(self, num_rows: int, seconds: float) -> None:
        """Take the time of a step that decoded num_rows rows and did nothing else."""
        ...

    def close(self) -> None: ...


@dataclass
class Scheduler:
    """Chooses the work of each step, and allocates sequences' blocks."""

    blocks: BlockManager
    worker: Worker  # holds the sequences' KV
    slice_rows: int  # positions of a slice
    max_sequences: int
    prefill_s: float  # maximum seconds of a step's prefill while answers wait
    in_turn: bool  # one prompt is computed to its end before the next, and those with stored KV share no launch
    launch_rows: int  # maximum rows of short prompts that share a step
    swap_blocks: int  # maximum blocks on the host
    counts: EngineStats
    speculation: Proposer | None = None
    states: list[RequestState] = field(default_factory=list)  # unfinished requests, in turn
    _step: Step = field(default_factory=Step)  # in preparation
    _prefilled: bool = False  # the last step prefilled
    # keys of prefills and swapped KV in the worker
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def with_status(self, status: SequenceStatus) -> list[Sequence]:
        """Return the sequences with this status, in order of service."""
        return [s for state in self.states for s in state.sequences if s.status is status]

    def add(self, state: RequestState) -> None:
        state.provenance = provenance_of(state, self.slice_rows)
        insort(self.states, state, key=attrgetter("turn"))

    def restart(self, sequence: Sequence) -> None:
        sequence.release(SequenceStatus.WAITING)
        sequence.state.provenance = provenance_of(sequence.state, self.slice_rows)
        if sequence in self._step.begin:
            self._step.begin.remove(sequence)

    def schedule(self) -> Step:
        """Return the work of the next step, empty if there is nothing to do."""
        if ended := [state for state in self.states if state.ended]:
            return Step(end=ended)
        while (swapped := self.with_status(SequenceStatus.SWAPPED)) and self._may_return(swapped[0]):
            self._swap_in(swapped[0])
        while not swapped and (found := self._next_prompt()) is not None:
            self._begin(*found)
        running = self.with_status(SequenceStatus.RUNNING)
        prefilling, decoding = [s for s in running if s.prefilling], [s for s in running if not s.prefilling]
        self._prefilled = bool(prefilling) and not (decoding and self._prefilled)
        if self._prefilled:
            self._step.prefill = self._together(prefilling)
            self._step.prefill_s = self.prefill_s if decoding else inf
            self._step.waits = not (decoding and self.in_turn)
        else:
            while decoding and not self.blocks.can_append(_growing(decoding)):
                self.preempt(running.pop())
                decoding = [s for s in running if not s.prefilling]
            self._step.decode, self._step.drafts = decoding, self._drafts(decoding)
        step, self._step = self._step, Step()
        return step

    def schedule_ahead(self, pending: Mapping[Sequence, Draw]) -> Step | None:
        """Return the next step if it only decodes the answers with pending tokens again, independent of the tokens;
        else None."""
        if not pending or any(state.ended for state in self.states):
            return None
        running, swapped = self.with_status(SequenceStatus.RUNNING), self.with_status(SequenceStatus.SWAPPED)
        again = bool(running) and all(s in pending and s.output is not None and s.output.can_run_ahead for s in running)
        joins = self._may_return(swapped[0]) if swapped else self._next_prompt() is not None
        if not again or joins or not self.blocks.can_append(_growing(running)):
            return None
        self._prefilled = False
        return Step(decode=running, pending=pending)

    def _drafts(self, decoding: list[Sequence]) -> Drafts:
        """Return the proposals of these sequences, none if the pool has no room for all."""
        drafts = {} if self.speculation is None else self.speculation.drafts(decoding)
        return drafts if self.blocks.can_append(_growing(decoding, drafts)) else {}

    @property
    def num_places(self) -> int:
        """Number of sequences that could begin now. A prompt being prefilled holds one place until its answers
        begin."""
        held = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
        return self.max_sequences - sum(len(self.with_status(status)) for status in held)

    def wave(self, num_left: int) -> int:
        """Return how many of a request's num_left answers start now: at most half of all places, to leave room for
        other requests."""
        return max(1, min(num_left, self.num_places + 1, max(1, self.max_sequences // 2)))

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks. It is swapped out if it decodes and the swap space has room, else queued again; a
        further request is always swapped out."""
        self.counts.preempted += 1
        held = [] if sequence.paged is None else sequence.paged.owned
        full = self.num_swapped + len(held) > self.swap_blocks and sequence.state.parent is None
        if sequence.prefilling or full:
            self.counts.recomputed += not sequence.prefilling
            self.restart(sequence)
        else:
            self._swap_out(sequence)

    @property
    def num_swapped(self) -> int:
        """Number of blocks on the host."""
        return sum(s.swapped.num_blocks for s in self.with_status(SequenceStatus.SWAPPED) if s.swapped is not None)

    def _swap_out(self, sequence: Sequence) -> None:
        assert sequence.paged is not None
        number, own, num_freed_blocks = next(self._numbers), sequence.paged.owned, sequence.paged.num_freed_blocks
        self._step.swaps.append(Swap(number, tuple(own), out=True))
        sequence.swapped = SwappedKV(self.worker, number, len(own), num_freed_blocks)
        sequence.paged.release()
        sequence.paged, sequence.status = None, SequenceStatus.SWAPPED

    def _swap_in(self, sequence: Sequence) -> None:
        kept = sequence.swapped
        assert kept is not None
        own = self.worker.allocator.allocate(kept.num_blocks)
        self._step.swaps.append(Swap(kept.number, tuple(own), out=False))
        sequence.paged = BlockTable(self.worker, [*own[:1] * kept.num_freed_blocks, *own], kept.num_freed_blocks)
        sequence.swapped, sequence.status = None, SequenceStatus.RUNNING

    def _may_return(self, sequence: Sequence) -> bool:
        kept = sequence.swapped
        assert kept is not None
        return self.blocks.can_swap_in(sequence.kv_len, kept.num_freed_blocks, kept.num_blocks)

    def _begin(self, sequence: Sequence, hit: PrefixHit) -> None:
        state = sequence.state
        sequence.paged = self.blocks.allocate(state.num_tokens, state.max_new_tokens, hit)
        rows, number = self._short_rows(state, hit), next(self._numbers)
        sequence.prefill = RunningPrefill(self.worker, number, hit.num_tokens, rows)
        sequence.status = SequenceStatus.RUNNING
        self._step.begin.append(sequence)

    def _next_prompt(self) -> tuple[Sequence, PrefixHit] | None:
        """Return the next prompt and its prefix cache hit if it may begin now."""
        waiting = self.with_status(SequenceStatus.WAITING)
        hit = self._may_begin(waiting[0]) if waiting else None
        return None if hit is None else (waiting[0], hit)

    def _may_begin(self, sequence: Sequence) -> PrefixHit | None:
        """Return the prompt's prefix cache hit if it may begin now, else None."""
        state, running = sequence.state, self.with_status(SequenceStatus.RUNNING)
        prefilling = [s for s in running if s.prefilling and self._precedes(s, state)]
        ahead = 0 if self.in_turn and not state.request.plan.stored else 1  # prompts that may begin beside another
        full = len(prefilling) > ahead  # only a short prompt may join other short ones
        if running and (self.num_places < 1 or (full and not self._may_join(prefilling, 0))):
            return None
        assert state.provenance is not None
        wanted_from = state.num_prompt_tokens - 1 if state.outputs_from is None else state.outputs_from
        hit = self.blocks.find(state.request.plan, state.provenance, wanted_from)
        if full and not self._may_join(prefilling, self._short_rows(state, hit)):
            return None
        headroom = max(1, state.max_new_tokens)
        if self.blocks.can_allocate(state.num_tokens, headroom, hit, sequence.num_new_tokens) is not Allocation.OK:
            return None
        # running answers at their maximum length fit the pool and the swap space, so that little is computed again
        growth = sum(map(self._growth, running)) + self.blocks.taken(state.num_tokens + headroom, hit)
        if running and growth > self.blocks.space.allocator.num_free + self.swap_blocks - self.num_swapped:
            return None
        return hit

    def _precedes(self, prefilling: Sequence, state: RequestState) -> bool:
        """Return whether a prompt that has begun is computed before a waiting one, which may outrank one that only
        loads."""
        if not self.in_turn or prefilling.prefill is None:
            return True
        return self.worker.computes(prefilling.prefill.number) or prefilling.state.turn < state.turn

    def _growth(self, sequence: Sequence) -> int:
        """Return the number of blocks that a running answer may still take."""
        state, held = sequence.state, 0 if sequence.paged is None else len(sequence.paged.blocks)
        return max(0, self.blocks.space.blocks_for(state.num_tokens + state.max_new_tokens) - held)

    def _short_rows(self, state: RequestState, hit: PrefixHit) -> int | None:
        """Return the rows of a prompt after the hit if it may share a launch. None if it has too many, needs repair, or
        is timed or observed by itself."""
        plan = state.request.plan
        if state.parent is not None or any(hook.is_alone for hook in state.hooks):
            return None
        if self.in_turn and plan.stored:
            return None
        return short_rows(plan.with_prefix_cache(hit.num_tokens), self.launch_rows)

    def _may_join(self, prefilling: list[Sequence], num_rows: int | None) -> bool:
        """Return whether a prompt of num_rows (None: not a short one) can share a step with all prompts before it."""
        short = [num_rows, *(s.prefill.short for s in prefilling if s.prefill is not None)]
        return None not in short and sum(n for n in short if n is not None) <= self.launch_rows

    def _together(self, prefilling: list[Sequence]) -> list[Sequence]:
        """Return the first prompt and the next ones that share its launch. None joins one that has begun."""
        prompts = [(s, s.prefill) for s in prefilling if s.prefill is not None]
        if self.in_turn:
            prompts.sort(key=lambda prompt: not self.worker.computes(prompt[1].number))
        (_, first), together = prompts[0], list[Sequence]()
        launch = first.launch
        for sequence, prefill in prompts:
            if together and (prefill.launch != launch or not self._may_join(together, prefill.short)):
                if launch is None:
                    break
                continue  # between the prompts of a launch that has begun
            together.append(sequence)
            prefill.launch = first.number
        return together


def _growing(decoding: list[Sequence], drafts: Drafts | None = None) -> list[tuple[BlockTable, int, int]]:
    """Return the sequences that decode into the pool's blocks, with their numbers of tokens and of further ones."""
    own = [(s, s.paged) for s in decoding if s.paged is not None]
    return [(paged, s.kv_len, 1 + len((drafts or {}).get(s, ()))) for s, paged in own]
