"""Worker: everything that runs on a device.

The core (`engine/core/core.py`) schedules, owns blocks and block tables, and draws tokens. A worker owns weights, the
pool's memory, the loader of stored KV, kernels and decode graphs. Its inputs are plain data (token ids, positions,
block tables, keys of stored KV, settings), so that workers on several devices get the same inputs; its outputs are
logits and figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.worker.attention import AttentionObserver
from cacheblend_cli.engine.worker.decode import EagerRunner, GraphRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory
from cacheblend_cli.engine.worker.prefill import Launch, PrefillInput, PrefillState
from cacheblend_cli.kv.block_table import BlockSpace, BlockTable
from cacheblend_cli.kv.pool import SequenceView, upload
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.model.decoder import Decoder

if TYPE_CHECKING:
    from cacheblend_cli.kv.export import KVReader
    from cacheblend_cli.kv.pool import Swapped

logger = logging.getLogger("cacheblend")


@dataclass(frozen=True)
class TableInput:
    """Blocks of a sequence; position p is in blocks[p // block_size]."""

    blocks: tuple[int, ...]
    num_freed_blocks: int = 0  # leading blocks that were given back

    @classmethod
    def of(cls, table: BlockTable) -> TableInput:
        return cls(tuple(table.blocks), table.num_freed_blocks)


@dataclass(frozen=True)
class Swap:
    """A move of KV between the pool and the host."""

    number: int  # key of the host copy
    blocks: tuple[int, ...]
    out: bool  # to the host


@dataclass(frozen=True)
class DecodeInput:
    """One decode step, with one entry per row in each field. A sequence has one row, and one for each proposal, at the
    next positions of the same table."""

    token_ids: tuple[int, ...]  # the newest tokens, whose KV is computed; empty if they are on the device alone
    kv_lens: tuple[int, ...]  # tokens whose KV is in the table
    tables: tuple[TableInput, ...]  # each has room for its rows, in blocks that are not shared
    watched: tuple[bool, ...]  # whether to return the attention


@dataclass(frozen=True)
class DecodeOutput:
    logits: Tensor  # fp32 [num_rows, vocab_size], valid until the next step
    attention: list[Tensor | None]  # [kv_len + 1] fp32 of the newest token, summed over observed layers, or None


class Worker(BlockSpace):
    """Computes in one pool, whose allocator the core uses."""

    def __init__(self, decoder: Decoder, memory: DeviceMemory) -> None:
        self._decoder, self._pool, self._runner = decoder, memory.pool, memory.runner
        self.block_size, self.allocator = memory.pool.block_size, memory.pool.allocator
        self.host_cache = memory.host_cache
        self._prefills: dict[int, PrefillState] = {}
        self._paused: dict[tuple[int, ...], Launch] = {}  # by the prompts' numbers
        self._swapped: dict[int, Swapped] = {}

    def has_state(self, block: int, num_tokens: int) -> bool:
        return self._pool.states is not None and self._pool.states.has(block, num_tokens)

    def begin(
        self, given: PrefillInput, source: KVSource | None, on_logits: Callable[[Tensor], None] = lambda logits: None
    ) -> None:
        """Start loading a prompt's stored KV from `source`. on_logits: callback for the requested logits, fp32 [n,
        vocab_size], in order. Raises BadChunk."""
        view = self._view(TableInput(given.blocks))
        state = PrefillState(self._decoder, source, view, given, on_logits, self.host_cache)
        self._prefills[given.number] = state.open()

    def prefill(self, numbers: Sequence[int], max_rows: int, waits: bool = True) -> list[PrefillResult]:
        """Compute the next layers of a prompt, or of several short prompts (`short_rows`) in one launch. max_rows:
        maximum rows x layers; at least a layer is computed. waits: False to end before a layer whose stored KV is not
        read yet; returns nothing if that is the first. Raises BadChunk, after which each prompt can be computed
        alone."""
        key = tuple(numbers)
        launch = self._paused.pop(key, None) or Launch([self._prefills[number] for number in numbers])
        results = launch.advance(max_rows, waits)
        if not results or results[0].is_paused:
            self._paused[key] = launch
        return results

    def computes(self, number: int) -> bool:
        """Return whether the prompt has layers on the device; false while its stored KV only loads to the host."""
        return number in self._prefills and self._prefills[number].has_begun

    def prepare(self) -> bool:
        """Capture a graph that a prompt lacked, while there is nothing else to do. Returns False if there is none.
        After an error, which is no request's, prefills use no graphs."""
        graphs = self._runner.layer_graphs if isinstance(self._runner, GraphRunner) else None
        if graphs is None:
            return False
        try:
            return graphs.capture_next()
        except Exception:
            logger.exception("layers of a prefill run without CUDA graphs from now on")
            graphs.is_on = False
            return False

    def end(self, number: int) -> None:
        """End the prefill with that number, if there is one."""
        self._paused = {key: launch for key, launch in self._paused.items() if number not in key}
        state = self._prefills.pop(number, None)
        if state is not None:
            state.close()

    def decode(self, given: DecodeInput, tokens: Tensor | None = None) -> DecodeOutput:
        """Compute a token for each row: its KV, and the logits after it. tokens: [num_rows] int64 on the device,
        None for given.token_ids."""
        views = [self._view(table) for table in given.tables]
        observed = [v if wanted else None for v, wanted in zip(views, given.watched, strict=True)]
        observer = AttentionObserver(self._decoder, observed, given.kv_lens)
        self._runner.begin(views, given.kv_lens, 1)
        if isinstance(self._runner, EagerRunner):
            self._runner.steps = observer if any(given.watched) else None
        tokens = upload(given.token_ids, self._decoder.device) if tokens is None else tokens
        return DecodeOutput(self._runner.step(tokens), observer.found)

    @torch.inference_mode()
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._pool.copy_blocks(source, target)

    @torch.inference_mode()
    def swap_out(self, number: int, blocks: Sequence[int]) -> None:
        """Copy the blocks' KV to the host, under that number."""
        self._swapped[number] = self._pool.swap_out(blocks)

    @torch.inference_mode()
    def swap_in(self, number: int, blocks: Sequence[int]) -> None:
        """Move the KV kept under the number back, into as many blocks."""
        self._pool.swap_in(blocks, self._swapped.pop(number))

    def forget(self, number: int) -> None:
        """Drop the KV kept under the number, if there is any."""
        self._swapped.pop(number, None)

    def export_kv(self, table: TableInput, num_tokens: int) -> KVReader:
        """Return a reader of the KV of a sequence's first num_tokens positions, valid while it holds its blocks."""
        from cacheblend_cli.kv.export import export

        return export(self._decoder, self._view(table), num_tokens)

    def close(self) -> None:
        """Release resources in other processes. The worker is not used afterwards."""

    def _view(self, table: TableInput) -> SequenceView:
        return SequenceView(self._pool, list(table.blocks), table.num_freed_blocks)
