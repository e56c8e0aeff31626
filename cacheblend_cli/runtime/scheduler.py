"""What an engine does next. This page is the whole policy.

First come first served among equals of priority. A sequence that was swapped out comes back before anything new begins. Of
prompts one is prefilled at a time, a piece a step, and between two pieces everybody who decodes gets a token. The next prompt
may begin to load meanwhile. Where blocks are short, who came last gives its own up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.runtime.block_manager import BlockManager
from cacheblend_cli.runtime.sequence import Sequence, Status


@dataclass(frozen=True)
class Step:
    """prefill: whose prompt is prefilled further; decode: who gets a token. Both empty: there is nothing to do."""

    prefill: Sequence | None = None
    decode: list[Sequence] = field(default_factory=list)


@dataclass
class Scheduler:
    """begin, come_back, give_up: how a sequence gets its blocks, gets them again and loses them. ahead: prompts that load while
    another is prefilled."""

    blocks: BlockManager
    max_sequences: int
    ahead: int
    begin: Callable[[Sequence], None]
    come_back: Callable[[Sequence], None]
    give_up: Callable[[Sequence], None]
    waiting: list[Sequence] = field(default_factory=list)  # a heap
    running: list[Sequence] = field(default_factory=list)
    swapped: list[Sequence] = field(default_factory=list)
    _prefilled: bool = False  # in the last step

    def schedule(self) -> Step:
        while self.swapped and self.blocks.can_swap_in((first := min(self.swapped)).kv_len, first.gone):
            self._move(first, self.swapped, self.come_back)
        while self.waiting and not self.swapped and self._may_begin(self.waiting[0]):
            first = heapq.heappop(self.waiting)
            self.running.append(first)
            self.begin(first)
        prefilling = [s for s in self.running if s.prefilling]
        decoding = [s for s in self.running if not s.prefilling]
        if prefilling and not (decoding and self._prefilled):
            self._prefilled = True
            return Step(prefill=min(prefilling))
        self._prefilled = False
        while decoding and not self.blocks.can_append([(s.paged, s.kv_len) for s in decoding if s.paged is not None]):
            self.preempt(max(self.running))
            decoding = [s for s in self.running if not s.prefilling]
        return Step(decode=sorted(decoding))

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks: one that decodes is swapped out, one whose prompt is not done begins again later."""
        self.running.remove(sequence)
        self.give_up(sequence)
        self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Put it where its status belongs."""
        if sequence.status is Status.WAITING:
            heapq.heappush(self.waiting, sequence)
        elif sequence.status is not Status.FINISHED:
            (self.running if sequence.status is Status.RUNNING else self.swapped).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget about it, wherever it is."""
        for place in (self.waiting, self.running, self.swapped):
            if sequence in place:
                place.remove(sequence)
        heapq.heapify(self.waiting)

    def _may_begin(self, sequence: Sequence) -> bool:
        run, prefilling = sequence.run, [s for s in self.running if s.prefilling]
        taken = len(self.running) + sum(s.run.num_answers - 1 for s in prefilling)
        if self.running and (taken + run.num_answers > self.max_sequences or len(prefilling) > self.ahead):
            return False
        found = run.find(self.blocks)
        return self.blocks.can_allocate(run.num_tokens, run.room, found) is Allocation.OK

    def _move(self, sequence: Sequence, place: list[Sequence], how: Callable[[Sequence], None]) -> None:
        place.remove(sequence)
        how(sequence)
        self.add(sequence)
