"""What an engine that answers many questions at once keeps of each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from cacheblend_cli.kv.hot_blocks import Hit, Origin
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.swap import SwappedKV
from cacheblend_cli.runtime.answer import Checks
from cacheblend_cli.runtime.ask import Asking
from cacheblend_cli.runtime.attention import AttentionShares
from cacheblend_cli.runtime.block_manager import BlockManager, Found
from cacheblend_cli.runtime.gate import Gate
from cacheblend_cli.runtime.generate import Generation, Utterance
from cacheblend_cli.runtime.jobs import Ticket
from cacheblend_cli.runtime.prefill import Prefilled, Prefilling
from cacheblend_cli.runtime.request import Request


class Status(Enum):
    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # has blocks: its prompt is prefilled, or it decodes
    SWAPPED = "swapped"  # has begun, and gave its blocks up to others
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One answer of a job. The first one prefills the prompt; the others begin as its copies.

    paged: its blocks while it runs; they hold kv_len tokens, all but the newest of what was drawn. swapped: its KV while
    it is swapped, None where it is to be computed again. generation: what came of it, in the end. watch: sees what it attends to.
    """

    run: Run
    index: int
    status: Status = Status.WAITING
    paged: PagedSequence | None = None
    kv_len: int = 0
    utterance: Utterance | None = None
    swapped: SwappedKV | None = None
    generation: Generation | None = None
    watch: AttentionShares | None = None

    def __lt__(self, other: Sequence) -> bool:
        """Whether it comes first: by priority, then by arrival."""
        return (self.run.ticket, self.index) < (other.run.ticket, other.index)

    @property
    def prefilling(self) -> bool:
        return self.status is Status.RUNNING and self.utterance is None

    @property
    def token_ids(self) -> list[int]:
        """Of the prompt and of what was drawn."""
        drawn = self.utterance.out.token_ids if self.utterance else []
        return [*self.run.request.plan.token_ids, *drawn]

    @property
    def gone(self) -> int:
        """Blocks that it does not want back when it is swapped in."""
        return 0 if self.swapped is None else self.swapped.gone

    def release(self) -> None:
        """Give its blocks back, and whatever else it holds."""
        if self.paged is not None:
            self.paged.release()
        self.paged, self.swapped = None, None


@dataclass(eq=False)
class Run:
    """A job and its answers. request: as it is run now; origin: how its KV comes to be. begun: it
    has left the queue, if only for a while. prefilling: while its prompt is prefilled; done: afterwards. first_logits: those after the prompt, where they are to be verified. gate: watches over its
    answer, where that is asked for."""

    ticket: Ticket
    asking: Asking
    request: Request
    room: int
    origin: Origin
    begun: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    prefilling: Prefilling | None = None
    done: Prefilled | None = None
    first_logits: Tensor | None = None
    checks: Checks = field(default_factory=Checks)
    gate: Gate | None = None

    def __post_init__(self) -> None:
        self.sequences.append(Sequence(self, 0))

    def find(self, blocks: BlockManager) -> Found:
        """What of its prompt is hot: nothing, where what each token predicts is wanted."""
        if self.request.sampling.prompt_logprobs is not None:
            return Found(Hit(), self.origin)
        return blocks.find(self.request.plan, self.origin)

    @property
    def num_answers(self) -> int:
        """Made at once."""
        return max(self.request.sampling.n, self.request.sampling.best_of)

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return self.request.plan.num_tokens

    @property
    def unfinished(self) -> Iterator[Sequence]:
        return (s for s in self.sequences if s.status is not Status.FINISHED)

    def stop_prefilling(self) -> None:
        """Load no more of its KV."""
        if self.prefilling is not None:
            self.prefilling.__exit__(None, None, None)
        self.prefilling = None
