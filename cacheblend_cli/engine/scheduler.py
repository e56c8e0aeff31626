"""What an engine does next. This page is the whole policy.

First come first served among equals of priority. A sequence that was swapped out comes back before anything new begins. Of
prompts one is prefilled at a time, a piece a step, and between two pieces everybody who decodes gets a token. The next prompt
may begin to load meanwhile. Where blocks are short, who came last gives its own up.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from cacheblend_cli.engine.block_manager import BlockManager
from cacheblend_cli.engine.jobs import EngineStats
from cacheblend_cli.engine.sequence import Run, Sequence, Status
from cacheblend_cli.kv.block_allocator import Allocation


@dataclass
class Scheduler:
    """begin: has a sequence get its blocks, or its job fail. ahead: prompts that load while another is prefilled. counts: what is
    done is counted there. runs: the jobs that are not over, in turn."""

    blocks: BlockManager
    max_sequences: int
    ahead: int
    begin: Callable[[Sequence], None]
    counts: EngineStats
    runs: list[Run] = field(default_factory=list)
    _prefilled: bool = False  # in the last step

    def those(self, status: Status) -> list[Sequence]:
        """The sequences of that status, in turn."""
        return [s for run in self.runs for s in run.sequences if s.status is status]

    def add(self, run: Run) -> None:
        """A job waits from now on."""
        insort(self.runs, run, key=attrgetter("turn"))

    def schedule(self) -> list[Sequence]:
        """Who goes on: one whose prompt is prefilled further, or all that get a token. Nobody: there is nothing to do."""
        while (swapped := self.those(Status.SWAPPED)) and self._may_return(swapped[0]):
            swapped[0].swap_in(self.blocks.pool)
        while not swapped and (waiting := self.those(Status.WAITING)) and self._may_begin(waiting[0]):
            self.begin(waiting[0])
        running = self.those(Status.RUNNING)
        prefilling = [s for s in running if s.prefilling]
        decoding = [s for s in running if not s.prefilling]
        if prefilling and not (decoding and self._prefilled):
            self._prefilled = True
            return prefilling[:1]
        self._prefilled = False
        while decoding and not self.blocks.can_append([(s.paged, s.kv_len) for s in decoding if s.paged is not None]):
            self.preempt(running.pop())
            decoding = [s for s in running if not s.prefilling]
        return decoding

    @property
    def num_places(self) -> int:
        """Sequences that could begin now. Each prompt that is prefilled holds one place until its answers begin."""
        return self.max_sequences - len(self.those(Status.RUNNING)) - len(self.those(Status.SWAPPED))

    def wave(self, num_left: int) -> int:
        """How many of a job's num_left answers begin now: at most half of all places, so that other jobs get in."""
        return max(1, min(num_left, self.num_places + 1, max(1, self.max_sequences // 2)))

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks: one that decodes is swapped out, one whose prompt is not done begins again later."""
        self.counts.preempted += 1
        if sequence.prefilling:
            sequence.run.start_again()
        else:
            sequence.swap_out()

    def _may_return(self, sequence: Sequence) -> bool:
        return self.blocks.can_swap_in(sequence.kv_len, sequence.gone, sequence.held)

    def _may_begin(self, sequence: Sequence) -> bool:
        run, running = sequence.run, self.those(Status.RUNNING)
        prefilling = [s for s in running if s.prefilling]
        if running and (self.num_places < 1 or len(prefilling) > self.ahead):
            return False
        found = run.find(self.blocks)
        return self.blocks.can_allocate(run.num_tokens, run.room, found, run.behind) is Allocation.OK
