"""Allocation of the pool's blocks to sequences, and lookups in the prefix cache."""

from __future__ import annotations

from collections.abc import Collection

from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.block_table import BlockSpace, BlockTable
from cacheblend_cli.kv.prefix_cache import KVProvenance, PrefixCache, PrefixHit
from cacheblend_cli.prompt.plan import PromptPlan


class BlockManager:
    """Gives sequences their blocks. watermark: share of the pool that a prompt leaves free, for answers that grow.
    enable_prefix_caching: see `Limits`. window: largest sliding window of the layers, None if one of them has none.
    Blocks that are in use at the beginning, such as the spare one for padding batches, are never given out."""

    def __init__(
        self,
        space: BlockSpace,
        watermark: float = 0.02,
        enable_prefix_caching: bool = True,
        window: int | None = None,
    ) -> None:
        self._window = window
        self.space, self._prefix_cache, self._keeps = space, PrefixCache(space), enable_prefix_caching
        self._reserve = int(watermark * space.allocator.num_blocks)
        self._in_use = space.allocator.num_used
        self._total = space.allocator.num_blocks - self._in_use

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return (self._total - self._reserve) * self.space.block_size

    def can_allocate(self, num_tokens: int, headroom: int, hit: PrefixHit, num_new_tokens: int = 1) -> Allocation:
        """Return OK if num_tokens + num_new_tokens fit now, LATER if they fit once blocks are freed, NEVER if
        num_tokens + headroom exceed the pool."""
        size = self.space.blocks_for
        if size(num_tokens + headroom) > self._total - self._reserve:
            return Allocation.NEVER
        return Allocation.OK if self.taken(num_tokens + num_new_tokens, hit) <= self._free else Allocation.LATER

    @property
    def _free(self) -> int:
        """Number of allocatable blocks; includes the watermark while no sequence holds a block."""
        allocator = self.space.allocator
        return allocator.num_free - (self._reserve if allocator.num_used > self._in_use else 0)

    def can_append(self, sequences: Collection[tuple[BlockTable, int, int]]) -> bool:
        """Return whether every sequence can take more tokens. sequences: (block table, number of its tokens, number of
        further ones)."""
        size, allocator, new = self.space.block_size, self.space.allocator, 0
        for table, kv_len, more in sequences:
            end = self.space.blocks_for(kv_len + more)
            written = table.blocks[kv_len // size : end]
            new += max(0, end - len(table.blocks)) + sum(map(allocator.is_shared, written))
        return new <= allocator.num_free

    def find(self, plan: PromptPlan, origin: KVProvenance, limit: int | None = None) -> PrefixHit:
        """Look up the prompt in the prefix cache: whole slices before the first chunk that needs repair. limit: maximum
        tokens; None: all but the last, whose logits are needed."""
        size, rows = self.space.block_size, origin.slice_rows
        blocks = self._prefix_cache.find(plan.token_ids, origin)
        num_tokens = min(len(blocks) * size, plan.num_tokens - 1 if limit is None else limit) // rows * rows
        while num_tokens and not self._continues(plan, blocks, num_tokens):
            num_tokens -= rows
        return PrefixHit(tuple(blocks[: num_tokens // size]), num_tokens)

    def _continues(self, plan: PromptPlan, blocks: list[int], num_tokens: int) -> bool:
        """Return whether a prompt can go on after these leading tokens: not within a chunk, which is loaded as a whole,
        and of a hybrid only with the state there."""
        if not plan.can_cut(num_tokens):
            return False
        needs_state = plan.in_order and plan.stored_until <= num_tokens
        return not needs_state or self.space.has_state(blocks[num_tokens // self.space.block_size - 1], num_tokens)

    def taken(self, num_tokens: int, hit: PrefixHit) -> int:
        """Return how many free blocks a prompt takes: its new blocks, plus blocks of the hit that no sequence holds."""
        return self.space.blocks_for(num_tokens) - sum(map(self.space.allocator.is_used, hit.blocks))

    def allocate(self, num_tokens: int, headroom: int, hit: PrefixHit) -> BlockTable:
        """Allocate the blocks of a prompt that begins with the hit, and may grow by `headroom` tokens. Raises
        DeviceError if there are too few."""
        space, allocator = self.space, self.space.allocator
        allocator.share(hit.blocks)  # first, so that allocating the rest evicts none of them
        try:
            count = space.blocks_for(num_tokens) - len(hit.blocks)
            fresh = allocator.allocate(count, headroom=space.blocks_for(headroom))
        except BaseException:
            allocator.free(hit.blocks)
            raise
        return BlockTable(space, [*hit.blocks, *fresh])

    def keep(self, sequence: BlockTable, token_ids: list[int], origin: KVProvenance) -> None:
        """Keep the whole slices of these leading tokens, whose KV is final, as a prefix cache."""
        if self._keeps:
            self._prefix_cache.keep(sequence, token_ids, origin)

    def num_unseen(self, kv_len: int) -> int:
        """Return the number of leading blocks outside every layer's window."""
        return 0 if self._window is None else max(0, kv_len - max(1, self._window - 1)) // self.space.block_size

    def can_swap_in(self, num_tokens: int, num_freed_blocks: int = 0, num_swapped: int = 0) -> bool:
        """Return whether a swapped-out sequence fits. num_freed_blocks: leading blocks already freed; num_swapped:
        blocks on the host, which may be more than it needs."""
        return max(self.space.blocks_for(num_tokens + 1) - num_freed_blocks, num_swapped) <= self._free

    def check_idle(self) -> None:
        """Assert that no sequence holds a block: free + cached + used = total, and only spare ones are used."""
        self.space.allocator.check_integrity()
        assert self.space.allocator.num_used == self._in_use, "blocks are used, and no sequence holds them"
