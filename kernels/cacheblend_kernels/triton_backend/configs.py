"""Tile tables per architecture and head size, and the number of context splits.

No autotuning at run time: the choice depends on shapes alone, so the same shapes always run the same code, and
every entry can be compiled and inspected without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_kernels.interface import KernelError

MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 256


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes and launch parameters of an attention kernel."""

    block_m: int  # rows x heads of a group in a tile
    block_n: int  # keys per step
    num_warps: int  # Triton's parameter
    num_stages: int  # Triton's parameter, see `stages`
    # prefill copies unmasked key tiles with the tensor memory accelerator, two per step, if the launch allows it
    tma: bool = False

    def stages(self, direct: bool) -> int:
        """num_stages to compile with. direct: the address of a key tile is known one step ahead.

        Keys behind a block table take two dependent loads. Triton divides the stages between them, so the same prefetch
        distance as in the direct case needs more stages.
        """
        return self.num_stages if direct or self.num_stages == 1 else 2 * self.num_stages - 1


@dataclass(frozen=True)
class LaunchPlan:
    """Target of an attention launch."""

    arch: int  # see `arch_of`
    num_sms: int  # number of multiprocessors
    config: TileConfig | None = None  # overrides the tables below
    num_splits: int | None = None  # overrides `num_context_splits`


def padded(n: int) -> int:
    """Return the power of two that a dimension of n is padded to (Triton tiles are powers of two)."""
    return 1 << max(0, n - 1).bit_length()


def arch_of(capability: tuple[int, int]) -> int:
    """Return the table key for a compute capability: 80, 90 or 100. Devices other than Hopper and data-centre Blackwell
    have the matrix instructions and the shared memory of 8.x (99 KiB in all but 8.0)."""
    return {9: 90, 10: 100}.get(capability[0], 80)


def prefill_configs(arch: int, head_dim: int, element_size: int, float8: bool = False) -> tuple[TileConfig, ...]:
    """All tiles that prefill attention may use, widest first.

    Wide tiles reuse each key the most; narrow ones fill the device when there are few rows. element_size: of the
    queries; float8: of the pool. Entries smaller or shallower than their neighbours spilled registers otherwise.
    """
    dim = padded(head_dim)
    if element_size == 4:  # no tensor cores in full fp32: small tiles, or the operands spill
        return (TileConfig(32, 16, 8, 1),) if dim <= 128 else (TileConfig(16, 16, 8, 1),)
    tma = arch >= 90
    if dim <= 64:
        narrow = TileConfig(16, 64, 4, 3) if arch >= 90 else TileConfig(16, 32, 4, 3)
        return TileConfig(128, 64, 8, 3, tma), TileConfig(64, 64, 4, 3, tma), narrow
    if dim <= 128:
        if arch < 90:
            wide = TileConfig(128, 32, 8, 3) if float8 or dim != head_dim else TileConfig(128, 64, 8, 3)
            return wide, TileConfig(64, 32, 4, 2), TileConfig(16, 32, 4, 3)
        return TileConfig(128, 64, 8, 3, tma), TileConfig(64, 32, 4, 3, tma), TileConfig(16, 64, 4, 3)
    if dim > 256:  # a head of 512 fills the registers with few rows
        wide = TileConfig(32, 16 if arch < 90 else 32, 8, 2)
        return wide, TileConfig(16, 16, 4, 2)
    # Pairs of tiles this wide leave no registers for a window's mask.
    widest = () if arch < 90 else (TileConfig(128, 32, 8, 2),)
    return *widest, TileConfig(64, 32, 8, 2), TileConfig(16, 32, 4, 2)


def copies_tiles(config: TileConfig, head_dim: int, element_size: int, block_size: int, contiguous: bool) -> bool:
    """Return whether the copy engine can load a launch's key tiles as boxes: whole heads of 2-byte values, each in one
    block. Only for a pool of q's dtype; float8 values are widened by the threads that read them."""
    one_block = contiguous or block_size % config.block_n == 0
    return config.tma and element_size == 2 and head_dim == padded(head_dim) and one_block


def pick_prefill_config(
    configs: tuple[TileConfig, ...], group: int, num_rows: int, num_kv_heads: int, num_sms: int, max_keys: int
) -> TileConfig:
    """Return the narrowest tile that holds all rows; if none does, the widest that still gives every multiprocessor
    work.

    max_keys: the longest context, which may be split. Raises KernelError if more heads share a KV head than the widest
    tile has rows.
    """
    fitting = [c for c in configs if c.block_m >= group]
    if not fitting:
        most = max(c.block_m for c in configs)
        raise KernelError(
            f"{group} heads share a KV head; prefill attention takes at most {most} of this head size and dtype here",
            "use --attention-backend torch",
        )
    for config in reversed(fitting):
        if config.block_m >= num_rows * group:  # few rows are bound by memory, and each key is read once
            return config
    # A wide tile with a split context reads each key once for all its rows; narrow tiles read it repeatedly.
    parts = max(1, min(MAX_SPLITS, max_keys // MIN_KEYS_PER_SPLIT))
    for config in fitting:
        if num_tiles(config, group, num_rows, 1) * num_kv_heads * parts >= num_sms:
            return config
    return fitting[0]


def num_tiles(config: TileConfig, group: int, num_rows: int, num_seqs: int) -> int:
    """Return an upper bound on tiles without reading row counts from the device: one partial tile per sequence."""
    return num_rows // (config.block_m // group) + num_seqs


def decode_config(head_dim: int, group: int, element_size: int) -> TileConfig:
    """Return the tile of decode attention: one row per sequence, so the heads of a group are its rows."""
    block_m = max(16, padded(group))
    dim = padded(head_dim)
    if element_size == 4:
        return TileConfig(block_m, 32 if dim <= 128 else 16, 4, 1)
    if dim <= 128:
        return TileConfig(block_m, 64, 4, 3)
    return TileConfig(block_m, 32, 4, 3) if dim <= 256 else TileConfig(block_m, 16, 4, 2)


def num_context_splits(num_programs: int, max_keys: int, num_sms: int) -> int:
    """Return the number of parts to split the context into (1: one kernel, PagedAttention v1; more: v2's reduction).

    num_programs: programs of an unsplit launch. Splits fill two waves of the device, keep at least MIN_KEYS_PER_SPLIT
    keys each, and are a power of two, so that a growing context rarely changes the kernel.
    """
    if num_programs >= num_sms or max_keys < 2 * MIN_KEYS_PER_SPLIT:
        return 1
    wanted = -(-2 * num_sms // max(1, num_programs))
    most = max_keys // MIN_KEYS_PER_SPLIT
    splits = max(1, min(wanted, most, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def split_counts(num_kv_heads: int, max_keys: int, num_sms: int) -> tuple[int, ...]:
    """Return all split counts of launches over contexts of up to max_keys."""
    most = num_context_splits(num_kv_heads, max_keys, num_sms)
    return tuple(1 << n for n in range(most.bit_length()))
