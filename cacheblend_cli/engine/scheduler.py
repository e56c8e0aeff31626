"""Scheduling policy, all of it.

Requests are served by priority, then first come, first served. A sequence that was swapped out comes back before a new one
begins. One prompt is prefilled at a time, a slice a step, and between two slices every running answer gets a token; short
prompts that follow each other share a step, if their rows are a slice at most. The next prompt may begin to load meanwhile. Where
blocks are short, the sequence that came last is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from cacheblend_cli.engine.block_manager import BlockManager
from cacheblend_cli.engine.events import EngineStats
from cacheblend_cli.engine.sequence import RequestState, Sequence, Status
from cacheblend_cli.engine.worker import Worker
from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.block_table import BlockTable
from cacheblend_cli.kv.prefix_cache import Hit


@dataclass
class Scheduler:
    """worker: keeps what is swapped out. begin: allocates a sequence's blocks, or fails its request. restart: queues its prompt
    again. ahead: prompts that load while another is prefilled. launch_rows: maximum rows of short prompts that share a step.
    swap_blocks: maximum blocks that are swapped out at a time. counts: preemptions are counted there. states: requests that are not
    over, in turn."""

    blocks: BlockManager
    worker: Worker
    max_sequences: int
    ahead: int
    launch_rows: int
    swap_blocks: int
    begin: Callable[[Sequence], None]
    restart: Callable[[Sequence], None]
    counts: EngineStats
    states: list[RequestState] = field(default_factory=list)
    _prefilled: bool = False  # in the last step

    def those(self, status: Status) -> list[Sequence]:
        """Sequences of that status, in turn."""
        return [s for state in self.states for s in state.sequences if s.status is status]

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        insort(self.states, state, key=attrgetter("turn"))

    def schedule(self) -> list[Sequence]:
        """Return the sequences whose prompts are prefilled in this step, or those that decode a token; none: nothing to do."""
        while (swapped := self.those(Status.SWAPPED)) and self._may_return(swapped[0]):
            swapped[0].swap_in()
        while not swapped and (waiting := self.those(Status.WAITING)) and self._may_begin(waiting[0]):
            self.begin(waiting[0])
        running = self.those(Status.RUNNING)
        prefilling = [s for s in running if s.prefilling]
        decoding = [s for s in running if not s.prefilling]
        if prefilling and not (decoding and self._prefilled):
            self._prefilled = True
            return self._together(prefilling)
        self._prefilled = False
        while decoding and not self.blocks.can_append(_growing(decoding)):
            self.preempt(running.pop())
            decoding = [s for s in running if not s.prefilling]
        return decoding

    @property
    def num_places(self) -> int:
        """Sequences that could begin now. Each prompt that is prefilled holds one place until its answers begin."""
        return self.max_sequences - len(self.those(Status.RUNNING)) - len(self.those(Status.SWAPPED))

    def wave(self, num_left: int) -> int:
        """Return how many of a request's num_left answers start now: at most half of all places, so that other requests are admitted."""
        return max(1, min(num_left, self.num_places + 1, max(1, self.max_sequences // 2)))

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks: one that decodes is swapped out; one whose prompt is not done, or that the swap space has no room for, is
        queued again. What checks an answer is always swapped out."""
        self.counts.preempted += 1
        held = 0 if sequence.paged is None else len(sequence.paged.owned)
        full = self.num_swapped + held > self.swap_blocks and sequence.state.parent is None
        if sequence.prefilling or full:
            self.counts.recomputed += not sequence.prefilling
            self.restart(sequence)
        else:
            sequence.swap_out(self.worker)

    @property
    def num_swapped(self) -> int:
        """Blocks whose KV is swapped out."""
        return sum(s.held for s in self.those(Status.SWAPPED))

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that a running answer may still take."""
        state, held = sequence.state, 0 if sequence.paged is None else len(sequence.paged.blocks)
        return max(0, self.blocks.space.blocks_for(state.num_tokens + state.max_new_tokens) - held)

    def _short_rows(self, state: RequestState, hit: Hit) -> int | None:
        if not self.ahead and any(s.cached and s.token_ids for s in state.request.plan.segments):
            return None  # prompts load one after another here
        return state.short_rows(hit.num_tokens, self.launch_rows)

    def _may_join(self, prefilling: list[Sequence], num_rows: int | None) -> bool:
        """Return whether a prompt of num_rows, None = not a short one, can be computed in one step with all that begun before it."""
        short = [num_rows, *(s.prefill.short for s in prefilling if s.prefill is not None)]
        return None not in short and sum(n for n in short if n is not None) <= self.launch_rows

    def _together(self, prefilling: list[Sequence]) -> list[Sequence]:
        """The first, and those behind it that are computed in the same step."""
        together = prefilling[:1]
        for sequence in prefilling[1:]:
            if sequence.prefill is None or not self._may_join(together, sequence.prefill.short):
                break
            together.append(sequence)
        return together

    def _may_return(self, sequence: Sequence) -> bool:
        return self.blocks.can_swap_in(sequence.kv_len, sequence.gone, sequence.held)

    def _may_begin(self, sequence: Sequence) -> bool:
        state, running = sequence.state, self.those(Status.RUNNING)
        prefilling = [s for s in running if s.prefilling]
        full = len(prefilling) > self.ahead  # only a short prompt may join others that are short
        if running and (self.num_places < 1 or (full and not self._may_join(prefilling, 0))):
            return False
        hit = state.find(self.blocks)
        if full and not self._may_join(prefilling, self._short_rows(state, hit)):
            return False
        headroom = max(1, state.max_new_tokens)
        if self.blocks.can_allocate(state.num_tokens, headroom, hit, sequence.room_behind) is not Allocation.OK:
            return False
        # At their longest, running answers have to fit the pool and the swap space, so that little is computed again.
        growth = sum(map(self._growth, running)) + self.blocks.taken(state.num_tokens + headroom, hit)
        return not running or growth <= self.blocks.space.allocator.num_free + self.swap_blocks - self.num_swapped


def _growing(decoding: list[Sequence]) -> list[tuple[BlockTable, int]]:
    """Return the sequences whose next token's KV goes into blocks here, with their numbers of tokens."""
    return [(s.paged, s.kv_len) for s in decoding if s.paged is not None and s.handed is None]
