"""Allocation of the pool's blocks to sequences, and lookups in the prefix cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.block_table import BlockSpace, BlockTable
from cacheblend_cli.kv.prefix_cache import Hit, KVProvenance, PrefixCache
from cacheblend_cli.prompt.plan import PromptPlan


@dataclass(frozen=True)
class Found:
    """Blocks of a prompt in the prefix cache, and the provenance of its KV if they are used."""

    hit: Hit
    origin: KVProvenance


class BlockManager:
    """watermark: share of the pool that a prompt leaves free, for answers that grow. in_use: blocks that are nobody's, but used,
    such as the spare one that decoding fills its batches with. enable_prefix_caching, reuse_repaired: see `Limits`. window: positions that a layer
    looks back at most, None where one of them looks at all."""

    def __init__(
        self,
        space: BlockSpace,
        watermark: float = 0.02,
        enable_prefix_caching: bool = True,
        reuse_repaired: bool = False,
        window: int | None = None,
    ) -> None:
        self._reuse_repaired, self._window = reuse_repaired, window
        self.space, self._prefix_cache, self._keeps = space, PrefixCache(space), enable_prefix_caching
        self._reserve = int(watermark * space.allocator.num_blocks)
        self._in_use = space.allocator.num_used
        self._total = space.allocator.num_blocks - self._in_use

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return (self._total - self._reserve) * self.space.block_size

    def can_allocate(self, num_tokens: int, headroom: int, found: Found, behind: int = 1) -> Allocation:
        """Return when a prompt of num_tokens can begin, and `behind` more: now, later or, with an answer of `headroom`, never."""
        size = self.space.blocks_for
        if size(num_tokens + headroom) > self._total - self._reserve:
            return Allocation.NEVER
        return Allocation.OK if self.taken(num_tokens + behind, found.hit) <= self._free else Allocation.LATER

    @property
    def _free(self) -> int:
        """Blocks that may be taken: all, where nobody has any."""
        allocator = self.space.allocator
        return allocator.num_free - (self._reserve if allocator.num_used > self._in_use else 0)

    def can_append(self, sequences: Collection[tuple[BlockTable, int]]) -> bool:
        """Return whether each of the (sequence, tokens it holds) can take one more token."""
        size, allocator = self.space.block_size, self.space.allocator
        new = sum(kv_len == s.capacity or allocator.is_shared(s.blocks[kv_len // size]) for s, kv_len in sequences)
        return allocator.can_append(new)

    def find(self, plan: PromptPlan, origin: KVProvenance, behind: int = 1) -> Found:
        """Look the prompt up in the prefix cache. Where only KV of the same slices counts, whole slices before the first blended
        chunk are found. Else exact KV serves every prompt up to what this one blends, or all of it, and blended KV serves one of
        the same provenance, if all that is blended is there. behind: as for `can_allocate`."""
        found = self._find(plan, origin)
        if self.taken(plan.num_tokens + behind, found.hit) <= self.space.allocator.num_free:
            return found
        return Found(Hit(), origin)  # with a copy of a block that is used in part it may take one more than without

    def _find(self, plan: PromptPlan, origin: KVProvenance) -> Found:
        token_ids, size = plan.token_ids, self.space.block_size
        if origin.slice_rows:
            num_tokens = origin.reusable(
                min(self._prefix_cache.find(token_ids, origin).num_tokens, plan.num_tokens - 1)
            )
            while (
                num_tokens and plan.cut_for(num_tokens) != num_tokens
            ):  # it ends within a chunk that is loaded as a whole
                num_tokens -= origin.slice_rows
            return Found(self._prefix_cache.find(token_ids[:num_tokens], origin).cut(num_tokens, size), origin)
        repaired = max((s.end for s in plan.segments if s.status == "blended"), default=0)
        exact = origin.in_full
        hit = self._prefix_cache.find(token_ids, exact)
        if hit.num_tokens >= repaired:
            return Found(hit.cut(plan.cut_for(hit.num_tokens), size), exact)
        blended = self._prefix_cache.find(token_ids, origin)
        if blended.num_tokens >= repaired:
            return Found(blended.cut(plan.cut_for(blended.num_tokens), size), origin)
        return Found(hit.cut(plan.cut_for(min(hit.num_tokens, origin.exact_until)), size), origin)

    def taken(self, num_tokens: int, hit: Hit) -> int:
        """Blocks that are not free any more once a prompt of num_tokens begins with the hit: its own, those of the hit that
        nobody else uses, and while it is copied the one that is used in part."""
        used, whole = self.space.allocator.is_used, hit.num_tokens // self.space.block_size
        part = sum(not used(block) for block in hit.blocks[whole:])
        return self.space.blocks_for(num_tokens) - sum(map(used, hit.blocks[:whole])) + part

    def allocate(self, num_tokens: int, headroom: int, hit: Hit) -> BlockTable:
        """Blocks for a prompt that begins with the hit. Raises DeviceError when there are too few."""
        return self._prefix_cache.take(hit, num_tokens, headroom)

    def keep(self, sequence: BlockTable, token_ids: list[int], origin: KVProvenance) -> None:
        """Keep the sequence's full blocks, whose KV is final, as a prefix cache."""
        if self._keeps:
            last = (
                len(token_ids)
                if self._reuse_repaired or not origin.blended
                else min(len(token_ids), origin.exact_until)
            )
            self._prefix_cache.keep(sequence, token_ids[: origin.reusable(last)], origin)

    def num_unseen(self, kv_len: int) -> int:
        """The first blocks of a sequence of kv_len tokens that none of its next tokens looks at, in any layer."""
        return 0 if self._window is None else max(0, kv_len - max(1, self._window - 1)) // self.space.block_size

    def can_swap_in(self, num_tokens: int, gone: int = 0, held: int = 0) -> bool:
        """Return whether a sequence that holds so many tokens can go on. gone: blocks of it that are not wanted any more; held: those that
        were swapped out, which may be more than it needs: there was a draft behind its prompt."""
        return max(self.space.blocks_for(num_tokens + 1) - gone, held) <= self._free

    def check_idle(self) -> None:
        """Nobody holds a block: free + cached + used = total, and used are the spare ones. Raises AssertionError: our own bug."""
        self.space.allocator.check_integrity()
        assert self.space.allocator.num_used == self._in_use, "blocks are used, and nobody holds them"
