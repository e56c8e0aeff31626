"""What an engine that answers many questions at once keeps of each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from cacheblend_cli.engine.answer import Confirmation, Verification
from cacheblend_cli.engine.attention import AttentionShares
from cacheblend_cli.engine.block_manager import BlockManager, Found
from cacheblend_cli.engine.controller import AutoReport
from cacheblend_cli.engine.gate import Gate
from cacheblend_cli.engine.generate import Generation, SequenceOutput
from cacheblend_cli.engine.jobs import Ticket
from cacheblend_cli.engine.prefill import Prefilled, PrefillState
from cacheblend_cli.engine.request import Request
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.prefix_cache import Hit, KVProvenance
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.kv.swap import SwappedKV, swap_in, swap_out


class Status(Enum):
    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # has blocks: its prompt is prefilled, or it decodes
    SWAPPED = "swapped"  # has begun, and gave its blocks up to others
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One answer of a job. The first one prefills the prompt; the others begin as its copies.

    paged: its blocks while it runs; they hold kv_len tokens, all but the newest of what was drawn. swapped: its KV while
    it is swapped. generation: what came of it, in the end. watch: sees what it attends to.
    """

    run: Run
    index: int
    status: Status = Status.WAITING
    paged: PagedSequence | None = None
    kv_len: int = 0
    utterance: SequenceOutput | None = None
    swapped: SwappedKV | None = None
    generation: Generation | None = None
    watch: AttentionShares | None = None

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

    @property
    def held(self) -> int:
        """Blocks that were swapped out."""
        return 0 if self.swapped is None else self.swapped.num_blocks

    def swap_out(self) -> None:
        """Its KV leaves the pool for the host's memory, until it is swapped in."""
        assert self.paged is not None
        self.swapped, self.paged, self.status = swap_out(self.paged), None, Status.SWAPPED

    def swap_in(self, pool: KVPool) -> None:
        assert self.swapped is not None
        self.paged = swap_in(pool, self.swapped, self.run.room)
        self.swapped, self.status = None, Status.RUNNING

    def release(self) -> None:
        """Give its blocks back, and whatever else it holds."""
        if self.paged is not None:
            self.paged.release()
        self.paged, self.swapped = None, None

    def finish(self) -> None:
        self.release()
        self.status = Status.FINISHED


@dataclass(eq=False)
class Run:
    """A job and its answers. request: as it is run now; report: what the loading controller decided of it; origin: how its KV
    comes to be. prefilling: while its prompt is prefilled; done: afterwards. first_logits: those after the prompt, where they
    are to be verified. gate: watches over its answer, where that is asked for. num_started: answers begun so far; they are
    made in waves where there are more than the engine has places for."""

    ticket: Ticket
    request: Request
    report: AutoReport | None
    room: int
    gate: Gate | None
    origin: KVProvenance = field(init=False)
    sequences: list[Sequence] = field(default_factory=list)
    prefilling: PrefillState | None = None
    done: Prefilled | None = None
    num_started: int = 0
    first_logits: Tensor | None = None
    verification: Verification | None = None
    confirmation: Confirmation | None = None

    def __post_init__(self) -> None:
        self.sequences.append(Sequence(self, 0))
        self.origin = origin_of(self.request)

    def find(self, blocks: BlockManager) -> Found:
        """What of its prompt is hot: nothing, where what each token predicts is wanted."""
        if self.request.sampling.prompt_logprobs is not None:
            return Found(Hit(), self.origin)
        return blocks.find(self.request.plan, self.origin, self.behind)

    @property
    def turn(self) -> tuple[int, int]:
        """The lowest comes first: by priority, then by arrival."""
        return self.ticket.job.priority, self.ticket.number

    @property
    def num_answers(self) -> int:
        """Answers to make, of which `sampling.n` are given."""
        return max(self.request.sampling.n, self.request.sampling.best_of)

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return self.request.plan.num_tokens

    @property
    def drafted(self) -> int:
        """Tokens of the answer that the selector drafts, as many as for one who asks alone."""
        blend = self.request.blend
        return min(blend.draft_tokens, self.room) if blend.drafts else 0

    @property
    def behind(self) -> int:
        """Tokens behind the prompt that there have to be blocks for when it begins: of the draft, or the answer's first."""
        return max(1, self.drafted)

    @property
    def unfinished(self) -> Iterator[Sequence]:
        return (s for s in self.sequences if s.status is not Status.FINISHED)

    def stop_prefilling(self) -> None:
        """Load no more of its KV."""
        if self.prefilling is not None:
            self.prefilling.__exit__(None, None, None)
        self.prefilling = None

    def start_again(self, bad: BadChunk | None = None) -> None:
        """The prompt waits as it did at first, its bad chunk to be computed."""
        if bad is not None:
            self.request = self.request.without(bad.key, bad.reason)
        self.stop_prefilling()
        self.origin = origin_of(self.request)
        self.sequences[-1].release()
        self.sequences[-1].status = Status.WAITING


def origin_of(request: Request) -> KVProvenance:
    """How the KV of a request's prompt comes to be. Exact KV of one tenant is the same whatever prompt it was computed for;
    where the store has it in a codec that loses something, it is of that codec."""
    plan = request.plan
    codecs: list[str] = []
    if not request.lossless:
        codecs = sorted({s.codec or request.collection.codec for s in plan.segments if s.cached})
    root = hashlib.blake2b(repr((request.collection.salt, codecs)).encode(), digest_size=16).digest()
    chunks = [(s.key, s.status, s.codec) for s in plan.chunks]
    return KVProvenance(root, plan.exact_until, repr((request.blend, plan.segments[0].status, chunks)).encode())
