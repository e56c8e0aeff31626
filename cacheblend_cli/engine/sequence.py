"""State of a request in the engine: its answers, and the blocks and KV that each of them holds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

from cacheblend_cli.blend.cost import AutoReport
from cacheblend_cli.engine.attention import AttentionShares
from cacheblend_cli.engine.block_manager import BlockManager
from cacheblend_cli.engine.events import Early, OnEvent
from cacheblend_cli.engine.prefill import PrefillInput, PrefillReport, PromptLogprobs
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.sequence_output import Generation, SequenceOutput
from cacheblend_cli.engine.slices import short_rows
from cacheblend_cli.engine.worker import Worker
from cacheblend_cli.kv.block_table import BlockTable
from cacheblend_cli.kv.prefix_cache import Hit, KVProvenance
from cacheblend_cli.kv.source import BadChunk

if TYPE_CHECKING:
    from cacheblend_cli.engine.checks import Checks
    from cacheblend_cli.engine.connectors.llama_cpp import LlamaSequence


class Status(Enum):
    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # has blocks: its prompt is prefilled, or it decodes
    SWAPPED = "swapped"  # has begun, and gave its blocks up to others
    FINISHED = "finished"


Outputs = tuple[int, Callable[[Tensor], None]]
"""A position of a prompt, and what is given the logits of its rows from there on, fp32 [n, vocab_size], in order."""


@dataclass(frozen=True)
class RunningPrefill:
    """A prompt that a worker computes under this number. hit_tokens: leading tokens whose KV came from the prefix cache. short: its
    rows, where it may share a launch with others."""

    worker: Worker
    number: int
    hit_tokens: int
    short: int | None = None


@dataclass(frozen=True)
class SwappedKV:
    """KV that a worker keeps on the host under this number, of num_blocks blocks. gone: blocks before these that the sequence had
    given back."""

    worker: Worker
    number: int
    num_blocks: int
    gone: int

    @classmethod
    def of(cls, worker: Worker, table: BlockTable) -> SwappedKV:
        """A copy of the table's KV."""
        number, own = next(worker.numbers), table.owned
        worker.swap_out(number, own)
        return cls(worker, number, len(own), table.gone)

    def restore(self) -> BlockTable:
        """Blocks of its own that hold it; it is kept no longer. Raises DeviceError when the pool is too small."""
        own = self.worker.allocator.allocate(self.num_blocks)
        self.worker.swap_in(self.number, own)
        return BlockTable(self.worker, [*own[:1] * self.gone, *own], self.gone)

    def forget(self) -> None:
        self.worker.forget(self.number)


@dataclass(eq=False)
class Sequence:
    """One answer of a request. The first of those that begin together prefills the prompt; the others begin as its copies.

    paged: its blocks while it runs; they hold kv_len tokens, all but the newest one. prefill: its prompt's, while that is
    computed. output: what is generated. swapped: its KV while it is swapped. generation: the result. watch: adds up its
    attention. handed: its KV in another engine, which decodes it from
    then on: its blocks stay as they were, also while it is swapped. stays: that engine refused it. replay: of its tokens, those that
    follow the next one to compute, since its KV was dropped: they are not drawn again.
    """

    state: RequestState
    index: int
    status: Status = Status.WAITING
    paged: BlockTable | None = None
    kv_len: int = 0
    prefill: RunningPrefill | None = None
    output: SequenceOutput | None = None
    swapped: SwappedKV | None = None
    generation: Generation | None = None
    watch: AttentionShares | None = None
    handed: LlamaSequence | None = None
    stays: bool = False
    replay: int = 0

    @property
    def prefilling(self) -> bool:
        return self.status is Status.RUNNING and self.prefill is not None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the prompt and the answer."""
        generated = self.output.out.token_ids if self.output else []
        return [*self.state.request.plan.token_ids, *generated]

    @property
    def next_token(self) -> int:
        """The token whose KV is computed next: the newest, unless some are computed again."""
        assert self.output is not None
        return self.output.out.token_ids[-1 - self.replay]

    @property
    def room_behind(self) -> int:
        """Tokens behind its prompt that there have to be blocks for when it begins."""
        again = 0 if self.output is None else len(self.token_ids) - self.state.num_tokens + 1
        return max(again, 1)

    def prefilled_again(self) -> None:
        """Its prompt is computed once more, as its KV was dropped: the tokens that it has are computed again, one a step as at
        first, so that the answer is the same to the bit."""
        assert self.output is not None
        self.kv_len = self.state.num_tokens
        self.replay = len(self.output.out.token_ids) - 1

    @property
    def gone(self) -> int:
        """Blocks that it does not want back when it is swapped in."""
        return 0 if self.swapped is None else self.swapped.gone

    @property
    def held(self) -> int:
        """Blocks that were swapped out."""
        return 0 if self.swapped is None else self.swapped.num_blocks

    def swap_out(self, worker: Worker) -> None:
        """Move its KV from the pool to the host's memory until it is swapped in."""
        assert self.paged is not None
        self.swapped = SwappedKV.of(worker, self.paged)
        self.paged.release()
        self.paged, self.status = None, Status.SWAPPED

    def swap_in(self) -> None:
        """Move its KV back into blocks of its own. Raises DeviceError when the pool is too small."""
        assert self.swapped is not None
        self.paged, self.swapped, self.status = self.swapped.restore(), None, Status.RUNNING

    def load(self, worker: Worker, hit_tokens: int, slice_rows: int) -> None:
        """Give its prompt to the worker, which begins to load stored KV. hit_tokens: of its blocks, from the prefix cache. Raises
        BadChunk."""
        assert self.paged is not None
        request, number = self.state.request, next(worker.numbers)
        plan = request.plan.with_prefix_cache(hit_tokens) if hit_tokens else request.plan
        outputs_from, on_logits = self.state.outputs() or (None, lambda logits: None)
        blocks, blend = tuple(self.paged.blocks), request.blend
        self.prefill = RunningPrefill(worker, number, hit_tokens, self.state.short_rows(hit_tokens, slice_rows))
        given = PrefillInput(number, plan, blocks, blend, request.lossless, slice_rows, outputs_from)
        worker.begin(given, request.source, on_logits)

    def stop_prefill(self) -> None:
        """Load no more of its KV."""
        if self.prefill is not None:
            self.prefill.worker.end(self.prefill.number)
        self.prefill = None

    def restart(self, bad: BadChunk | None = None) -> None:
        """Queue its prompt again. bad: a chunk that has to be computed."""
        if bad is not None:
            self.state.request = self.state.request.without(bad.key, bad.reason)
        self.release()
        self.status = Status.WAITING

    def release(self) -> None:
        """Give its blocks back, and forget what was swapped out."""
        self.stop_prefill()
        if self.paged is not None:
            self.paged.release()
        if self.swapped is not None:
            self.swapped.forget()
        if self.handed is not None:
            self.handed.release()
        self.paged, self.swapped, self.handed = None, None, None

    def finish(self) -> None:
        self.release()
        self.status = Status.FINISHED


@dataclass(eq=False)
class RequestState:
    """A submitted request and its answers. number: arrival order. submitted: time.monotonic(). begun: it has left the queue, if
    only for a while. parent: the request on whose behalf the engine made this one.

    After `admit`: request: as it is run now; report: the loading controller's decision; max_new_tokens: of an answer, with its
    reasoning; checks: of its answer against a full prefill. provenance: of its KV. prompt_logprobs: of its prompt's tokens, where
    requested. done: its prompt, prefilled. num_started: answers begun so far.
    """

    request: Request
    on_event: OnEvent
    number: int
    parent: RequestState | None = None
    submitted: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    begun: bool = False
    report: AutoReport | None = None
    max_new_tokens: int = 0
    checks: Checks | None = None
    provenance: KVProvenance = field(init=False)
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    done: PrefillReport | None = None
    num_started: int = 0

    @property
    def ended(self) -> Early | None:
        """Why it is to end early, None to go on."""
        if self.parent is not None:
            return self.parent.ended
        if self.cancelled:
            return "cancelled"
        limit_s = self.request.options.deadline_s
        return "deadline" if limit_s is not None and time.monotonic() - self.submitted >= limit_s else None

    @property
    def turn(self) -> tuple[int, int, bool]:
        """The lowest comes first: by priority, then by arrival."""
        return self.request.options.priority, self.number, self.parent is not None

    @property
    def num_answers(self) -> int:
        """Answers to make, of which `sampling.n` are given."""
        return max(self.request.sampling.n, self.request.sampling.best_of)

    @property
    def streams(self) -> bool:
        """Return whether its tokens are emitted one by one: not before the likeliest answers are chosen, nor what may be replaced."""
        return self.num_answers <= self.request.sampling.n and (self.checks is None or self.checks.fit is None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to prefill."""
        return self.request.plan.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Number of these that are the prompt: a check computes an answer's tokens behind it."""
        return self.num_tokens

    @property
    def unfinished(self) -> Iterator[Sequence]:
        return (s for s in self.sequences if s.status is not Status.FINISHED)

    def outputs(self) -> Outputs | None:
        """Rows of the prompt whose logits are wanted, None = the last one's only. Called when the prefill begins."""
        top = self.request.sampling.prompt_logprobs
        if top is None:
            return None
        self.prompt_logprobs = PromptLogprobs(self.request.plan.token_ids, top)
        return 0, self.prompt_logprobs

    def short_rows(self, hit_tokens: int, slice_rows: int) -> int | None:
        """Rows of its prompt behind hit_tokens from the prefix cache, where it may share a launch with others. None where it has
        too many, needs repair, or is timed or watched by itself."""
        if self.report is not None or self.request.sampling.prompt_logprobs is not None or self.parent is not None:
            return None
        return short_rows(self.request.plan.with_prefix_cache(hit_tokens), slice_rows)

    def find(self, blocks: BlockManager) -> Hit:
        """Look its prompt up in the prefix cache, up to the first token whose logits are wanted."""
        limit = 0 if self.request.sampling.prompt_logprobs is not None else self.num_prompt_tokens - 1
        return blocks.find(self.request.plan, self.provenance, limit)


def provenance_of(state: RequestState, slice_rows: int) -> KVProvenance:
    """Return the provenance of the KV of a request's prompt: of each whole slice of slice_rows positions before the first chunk that
    needs repair, the stored KV in it."""
    request, plan, slices = state.request, state.request.plan, []
    for start in range(0, min(plan.exact_until, state.num_prompt_tokens) - slice_rows + 1, slice_rows):
        end = start + slice_rows
        stored = [
            (s.start, s.end, s.key, s.codec) for s in plan.segments if s.cached and s.start < end and s.end > start
        ]
        slices.append(hashlib.blake2b(repr((slice_rows, stored)).encode(), digest_size=16).digest())
    root = hashlib.blake2b(request.collection.salt.encode(), digest_size=16).digest()
    return KVProvenance(root, tuple(slices), slice_rows)
