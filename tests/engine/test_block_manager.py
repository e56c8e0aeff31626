"""The block manager against a model of the contents of every sequence: no block is lost, and none has two writers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheblend_cli.engine.core.block_manager import BlockManager
from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.block_table import BlockTable
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.prefix_cache import KVProvenance, PrefixHit
from cacheblend_cli.prompt.plan import ChunkInput, PromptPlan, plan_prompt

SIZE, BLOCKS, WINDOW = 4, 12, 10
SLICE = 2 * SIZE


class OneLayerPool(KVPool):
    """A pool whose K at a slot is the mark of who wrote it there."""

    def __init__(self) -> None:
        spec = type(
            "Spec",
            (),
            {"kv_shapes": ((1, 1),), "num_kv_layers": 1, "num_layers": 1, "kv_layer": lambda self, layer: layer},
        )()
        super().__init__(spec, BLOCKS, SIZE, torch.float32, torch.device("cpu"))


@dataclass
class Held:
    """A sequence, and what it wrote or was given: the mark of each position."""

    plan: PromptPlan
    ids: list[int]
    marks: list[float]
    origin: KVProvenance
    paged: BlockTable | None
    swapped: tuple[list[torch.Tensor], dict[int, object]] | None = None
    num_freed_blocks: int = 0


def mark(ids: list[int], position: int, origin: KVProvenance) -> float:
    """KV at the position: of the ids up to it, the slices so far, and behind those of its prompt alone."""
    how = origin.slices[: position // SLICE + 1] if position < origin.num_tokens else (b"own", repr(origin).encode())
    return float(hash((origin.root, how, tuple(ids[: position + 1]))) % 1_000_003)


def origin_of(plan: PromptPlan) -> KVProvenance:
    slices = [
        repr([s.key for s in plan.segments if s.cached and s.start < start + SLICE and s.end > start]).encode()
        for start in range(0, plan.exact_until - SLICE + 1, SLICE)
    ]
    return KVProvenance(b"root", tuple(slices), SLICE)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = OneLayerPool()
        self.blocks = BlockManager(self.pool, watermark=0.1, window=WINDOW)
        self.held: list[Held] = []

    def view(self, held: Held) -> PagedSequence:
        """Where the positions are in the pool."""
        assert held.paged is not None
        return PagedSequence(self.pool, held.paged.blocks, held.paged.num_freed_blocks)

    def write(self, held: Held, start: int) -> None:
        """Positions from start on, to slots that nobody else reads."""
        assert held.paged is not None
        others = {b for h in self.held if h is not held and h.paged is not None for b in h.paged.owned}
        positions = torch.arange(start, len(held.ids))
        touched = {held.paged.blocks[int(p) // SIZE] for p in positions}
        assert not touched & others, "a block with two writers"
        held.marks[start:] = [mark(held.ids, int(p), held.origin) for p in positions]
        self.pool.layers[0].k.view(-1)[self.view(held).slots(positions)] = torch.tensor(held.marks[start:])

    @rule(chunks=st.lists(st.integers(0, 2), max_size=3), suffix=st.lists(st.integers(0, 2), min_size=1, max_size=5),
          blend=st.booleans(), headroom=st.integers(1, 6))  # fmt: skip
    def begin(self, chunks: list[int], suffix: list[int], blend: bool, headroom: int) -> None:
        inputs = [ChunkInput(bytes([c]), "", (10 + c,) * (3 + c), cached=blend) for c in chunks]
        plan = plan_prompt([7, 7, 7], inputs, suffix)
        origin = origin_of(plan)
        hit = self.blocks.find(plan, origin)
        assert hit.num_tokens < plan.num_tokens
        if self.blocks.can_allocate(plan.num_tokens, headroom, hit) is not Allocation.OK:
            return
        held = Held(plan, plan.token_ids, [0.0] * plan.num_tokens, origin, None)
        held.paged = self.blocks.allocate(plan.num_tokens, headroom, hit)
        slots = self.view(held).slots(torch.arange(hit.num_tokens))
        held.marks[: hit.num_tokens] = self.pool.layers[0].k.view(-1)[slots].tolist()
        expected = [mark(held.ids, p, origin) for p in range(hit.num_tokens)]
        assert held.marks[: hit.num_tokens] == expected, "KV of another prompt, or blended taken for exact"
        self.write(held, hit.num_tokens)
        self.held.append(held)
        self.blocks.keep(held.paged, held.ids, held.origin)

    @precondition(lambda self: any(h.paged for h in self.held))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=2 * SIZE + 1))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        """Of one token, or of several, not all of which are taken, as with proposals."""
        held = data.draw(st.sampled_from([h for h in self.held if h.paged]))
        assert held.paged is not None
        at, end = len(held.ids), len(held.ids) + len(tokens)
        fits = self.blocks.can_append([(held.paged, at, len(tokens))])
        shared = sum(map(self.pool.allocator.is_shared, held.paged.blocks[at // SIZE : -(-end // SIZE)]))
        assert fits == (max(0, -(-end // SIZE) - len(held.paged.blocks)) + shared <= self.pool.allocator.num_free)
        if not fits:
            return
        held.paged.ensure(end)
        held.paged.make_writable(at, end)
        held.ids, held.marks = [*held.ids, *tokens], [*held.marks, *[0.0] * len(tokens)]
        self.write(held, at)
        taken = at + data.draw(st.integers(1, len(tokens)))
        held.ids, held.marks = held.ids[:taken], held.marks[:taken]  # the blocks of the others remain

    @precondition(lambda self: any(h.paged for h in self.held))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([h for h in self.held if h.paged]))
        assert held.paged is not None
        self.held.append(Held(held.plan, list(held.ids), list(held.marks), held.origin, held.paged.fork()))

    @precondition(lambda self: any(h.paged for h in self.held))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Give back the blocks outside the window."""
        held = data.draw(st.sampled_from([h for h in self.held if h.paged]))
        assert held.paged is not None
        unseen = self.blocks.num_unseen(len(held.ids))
        assert unseen * SIZE <= max(0, len(held.ids) + 1 - WINDOW)
        if unseen > held.paged.num_freed_blocks:
            self.blocks.keep(held.paged, held.ids, held.origin)
            held.paged.give_back(unseen)

    @precondition(lambda self: any(h.paged for h in self.held))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([h for h in self.held if h.paged]))
        assert held.paged is not None
        held.swapped, held.num_freed_blocks = self.pool.swap_out(held.paged.owned), held.paged.num_freed_blocks
        held.paged.release()
        held.paged = None

    @precondition(lambda self: any(h.swapped for h in self.held))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([h for h in self.held if h.swapped]))
        assert held.swapped is not None
        num_swapped = len(held.swapped[0][0])
        if self.blocks.can_swap_in(len(held.ids), held.num_freed_blocks, num_swapped):
            own = self.pool.allocator.allocate(num_swapped)
            self.pool.swap_in(own, held.swapped)
            held.paged, held.swapped = (
                BlockTable(self.pool, [*own[:1] * held.num_freed_blocks, *own], held.num_freed_blocks),
                None,
            )

    @precondition(lambda self: self.held)
    @rule(data=st.data(), finished=st.booleans())
    def end(self, data: st.DataObject, finished: bool) -> None:
        """Finished, or cancelled."""
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if held.paged is not None:
            if finished:
                self.blocks.keep(held.paged, held.ids, held.origin)
            held.paged.release()

    @invariant()
    def everybody_has_what_is_his(self) -> None:
        self.pool.allocator.check_integrity()
        used = {b for h in self.held if h.paged for b in h.paged.owned}
        assert self.pool.allocator.num_used == len(used)
        for held in self.held:
            if held.paged is not None:
                seen = held.paged.num_freed_blocks * SIZE
                slots = self.view(held).slots(torch.arange(seen, len(held.ids)))
                assert self.pool.layers[0].k.view(-1)[slots].tolist() == held.marks[seen:]

    def teardown(self) -> None:
        for held in self.held:
            if held.paged is not None:
                held.paged.release()
        self.blocks.check_idle()


TestBlockManager = Machine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_several_tokens_need_a_copy_of_each_shared_block() -> None:
    blocks = BlockManager(OneLayerPool(), watermark=0.0)
    first = blocks.allocate(SIZE + 2, 0, PrefixHit())
    first.ensure(3 * SIZE)
    second, rest = first.fork(), blocks.allocate((BLOCKS - 4) * SIZE, 0, PrefixHit())
    assert blocks.space.allocator.num_free == 1
    assert blocks.can_append([(first, SIZE + 2, 2)])
    assert not blocks.can_append([(first, SIZE + 2, 3)]), "two shared blocks"
    second.release()
    assert blocks.can_append([(first, SIZE + 2, 3 * SIZE - 2)])
    assert not blocks.can_append([(first, SIZE + 2, 3 * SIZE - 1)])
    for table in (first, rest):
        table.release()
    blocks.check_idle()


def test_a_prompt_waits_for_room_or_never_fits() -> None:
    blocks = BlockManager(OneLayerPool(), watermark=0.1)
    none = PrefixHit()
    assert blocks.most_tokens == 11 * SIZE
    assert blocks.can_allocate(20, 24, none) is Allocation.OK
    assert blocks.can_allocate(20, 25, none) is Allocation.NEVER
    first = blocks.allocate(24, 0, PrefixHit())
    assert blocks.can_allocate(16, 4, none) is Allocation.OK
    assert blocks.can_allocate(20, 4, none) is Allocation.LATER  # it would leave nothing for who runs to grow
    first.release()
    assert blocks.can_allocate(40, 4, none) is Allocation.OK
    blocks.check_idle()


def test_a_prompt_as_large_as_the_pool_shares_its_cached_blocks() -> None:
    blocks = BlockManager(OneLayerPool(), watermark=0.0)
    first = plan_prompt([], [], [1] * (BLOCKS * SIZE - 4))
    sequence = blocks.allocate(first.num_tokens, 0, PrefixHit())
    blocks.keep(sequence, first.token_ids, origin_of(first))
    sequence.release()
    for plan, found in (
        (plan_prompt([], [], [1] * (BLOCKS * SIZE - 6) + [2] * 5), 40),
        (plan_prompt([], [], [1, 1, 2]), 0),
    ):
        hit = blocks.find(plan, origin_of(plan))
        assert hit.num_tokens == found
        assert blocks.can_allocate(plan.num_tokens, 0, hit) is Allocation.OK
        sequence = blocks.allocate(plan.num_tokens, 0, hit)
        sequence.release()
    blocks.check_idle()
