"""Recurrent states of the sequences in a pool, for hybrids.

A state is held under the block of the last position that it covers: so it is copied, swapped and freed with that block,
and the prefix cache finds it with the block. A pass reads a sequence's state where its rows begin, and leaves the one
where they end. States after whole blocks of a prompt stay for later prompts, the least recently used are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cacheblend_cli.kv.block_allocator import BlockAllocator
from cacheblend_cli.kv.block_table import BlockTable
from cacheblend_cli.model.states import LaunchStates, SequenceState, StateLayout

MOST_KEPT = 16
"""States for later prompts: with those of Qwen3.5-9B (48 MiB) less than a GiB."""


@dataclass(frozen=True)
class BlockState:
    num_tokens: int  # leading tokens of the sequence that it covers
    state: SequenceState
    is_last: bool = True  # a sequence continues from it


class BlockStates:
    """layout: of the model's states. allocator: of the blocks."""

    def __init__(self, block_size: int, layout: StateLayout, allocator: BlockAllocator) -> None:
        self._size, self._layout, self._allocator = block_size, layout, allocator
        self._of: OrderedDict[int, BlockState] = OrderedDict()  # by block, least recently used first
        self._freed: dict[int, BlockState] = {}  # of blocks freed since the last launch: they may still be swapped out
        allocator.on_free = self._drop

    def has(self, block: int, num_tokens: int) -> bool:
        """Return whether the block has the state after the first num_tokens of its sequence."""
        return block in self._of and self._of[block].num_tokens == num_tokens

    def at(self, table: BlockTable, num_tokens: int) -> SequenceState:
        """Return the state after the first num_tokens of a sequence."""
        if not num_tokens:
            return self._layout.initial
        block = table.blocks[(num_tokens - 1) // self._size]
        assert self.has(block, num_tokens), f"no state after {num_tokens} tokens"
        self._of.move_to_end(block)
        return self._of[block].state

    def put(self, table: BlockTable, num_tokens: int, state: SequenceState, before: int = 0, keep: bool = True) -> None:
        """Set the state after the first num_tokens of a sequence, which was computed from the one after `before`
        tokens. That one is dropped; if it follows a whole block and `keep` is set, it is kept for later prompts."""
        block = table.blocks[(num_tokens - 1) // self._size]
        old = table.blocks[(before - 1) // self._size] if before else block
        if old != block and self.has(old, before) and not self._allocator.is_shared(old):
            if keep and before % self._size == 0:
                self._of[old] = replace(self._of[old], is_last=False)
            else:
                del self._of[old]
        self._of[block] = BlockState(num_tokens, state)
        self._of.move_to_end(block)
        kept = [b for b, held in self._of.items() if not held.is_last]
        for block in kept[: max(0, len(kept) - MOST_KEPT)]:
            del self._of[block]

    def pin(self, table: BlockTable, num_tokens: int) -> None:
        """Keep the state after the first num_tokens until the sequence has continued from it."""
        self.put(table, num_tokens, self.at(table, num_tokens))

    def launch(self, parts: Sequence[tuple[BlockTable, int, int]], decode: bool) -> OpenStates:
        """Return the states before a launch. parts: table, first position and rows of each sequence."""
        self._freed.clear()
        before = [self.at(table, start) for table, start, _ in parts]
        return OpenStates([count for *_, count in parts], before, decode, held=self, parts=parts)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the states of blocks. Tensors are shared, as nothing writes to them."""
        for old, new in zip(source, target, strict=True):
            if old in self._of:
                self._of[new] = self._of[old]

    def take_out(self, blocks: Sequence[int]) -> dict[int, BlockState]:
        """Return the last states of the blocks on the host, by place in the list. The blocks may have been freed."""
        known = self._freed | self._of
        held = {i: known[block] for i, block in enumerate(blocks) if block in known}
        return {
            i: replace(own, state=tuple({name: t.cpu() for name, t in layer.items()} for layer in own.state))
            for i, own in held.items()
            if own.is_last
        }

    def put_back(self, blocks: Sequence[int], taken: dict[int, BlockState], device: torch.device) -> None:
        """Put `take_out`'s states into other blocks."""
        for i, own in taken.items():
            state = tuple({name: t.to(device) for name, t in layer.items()} for layer in own.state)
            self._of[blocks[i]] = replace(own, state=state)

    def _drop(self, block: int) -> None:
        """Forget the state of a block that is freed."""
        if (held := self._of.pop(block, None)) is not None:
            self._freed[block] = held


@dataclass
class OpenStates(LaunchStates):
    """The states of a launch over a pool."""

    held: BlockStates | None = None
    parts: Sequence[tuple[BlockTable, int, int]] = ()

    def close(self) -> None:
        """Keep the states after the launch."""
        assert self.held is not None
        for (table, start, count), state in zip(self.parts, self.final(), strict=True):
            self.held.put(table, start + count, state, start, keep=not self.decode)
