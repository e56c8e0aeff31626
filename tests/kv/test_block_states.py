"""Recurrent states under the blocks of a pool: held where a sequence ends, kept for later prompts, and gone with their
blocks."""

from __future__ import annotations

import pytest
import torch

from cacheblend_cli.kv import block_states
from cacheblend_cli.kv.block_allocator import BlockAllocator
from cacheblend_cli.kv.block_states import BlockStates
from cacheblend_cli.kv.block_table import BlockSpace, BlockTable
from cacheblend_cli.model.states import SequenceState, StateLayout

SIZE = 4


class Space(BlockSpace):
    block_size = SIZE

    def __init__(self) -> None:
        self.allocator = BlockAllocator(32)
        self.states = BlockStates(SIZE, StateLayout.of(state(0)), self.allocator)

    def copy_blocks(self, source: object, target: object) -> None:
        self.states.copy(source, target)  # type: ignore[arg-type]

    def table(self, num_tokens: int) -> BlockTable:
        return BlockTable(self, self.allocator.allocate(self.blocks_for(num_tokens)))


def state(value: float) -> SequenceState:
    return ({"conv0": torch.full((1, 2), value)}, {})


def value(found: SequenceState) -> float:
    return float(found[0]["conv0"][0, 0])


def test_a_state_is_found_only_where_it_was_left() -> None:
    space = Space()
    table = space.table(8)
    assert space.states.at(table, 0) == ({}, {})
    space.states.put(table, 6, state(6.0))
    assert value(space.states.at(table, 6)) == 6
    assert space.states.has(table.blocks[1], 6)
    assert not space.states.has(table.blocks[1], 5)
    assert not space.states.has(table.blocks[0], 4)
    with pytest.raises(AssertionError, match="no state after 5 tokens"):
        space.states.at(table, 5)


def test_only_states_after_whole_blocks_are_kept() -> None:
    space = Space()
    table, held = space.table(20), space.states
    for before, after in ((0, 4), (4, 6), (6, 8), (8, 10), (10, 13), (13, 20)):
        held.put(table, after, state(after), before)
    assert [n for n in range(21) if n and held.has(table.blocks[(n - 1) // SIZE], n)] == [4, 8, 20]
    held.put(table, 20, state(20), 16, keep=False)
    decoded = space.table(12)
    held.put(decoded, 8, state(8))
    held.put(decoded, 9, state(9), 8, keep=False)
    assert not held.has(decoded.blocks[1], 8)


def test_the_least_recently_used_is_dropped_and_never_one_that_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_states, "MOST_KEPT", 2)
    space = Space()
    held, tables = space.states, [space.table(8) for _ in range(4)]
    for table in tables:
        held.put(table, 4, state(4))
    for table in tables[:3]:
        held.put(table, 8, state(8), 4)
    assert [held.has(table.blocks[0], 4) for table in tables] == [False, True, True, True]
    held.at(tables[1], 4)
    held.pin(tables[2], 4)
    held.put(tables[3], 8, state(8), 4)
    assert [held.has(table.blocks[0], 4) for table in tables] == [False, True, True, True]
    assert all(held.has(table.blocks[1], 8) for table in tables)


def test_a_branch_has_its_own() -> None:
    space = Space()
    first = space.table(6)
    space.states.put(first, 6, state(6))
    second = first.fork()
    second.make_writable(6, 7)
    space.states.put(second, 7, state(7), 6, keep=False)
    assert value(space.states.at(first, 6)) == 6
    third = first.fork()
    third.ensure(9)
    space.states.put(third, 9, state(9), 6, keep=False)  # in a new block, while the old one is shared
    assert value(space.states.at(first, 6)) == 6


def test_freed_blocks_have_none_but_may_be_swapped_out() -> None:
    """The scheduler frees blocks before the worker copies them to the host, and gives them away at once."""
    space = Space()
    held, table = space.states, space.table(6)
    held.put(table, 6, state(6))
    blocks = list(table.blocks)
    table.release()
    assert not held.has(blocks[1], 6)
    taken = held.take_out(blocks)
    again, other = space.table(6), space.table(6)
    held.put_back(other.blocks, taken, torch.device("cpu"))
    assert again.blocks == blocks
    assert not held.has(again.blocks[1], 6)
    assert value(held.at(other, 6)) == 6
    held.launch([(other, 6, 1)], decode=True)
    assert held.take_out(blocks) == {}
