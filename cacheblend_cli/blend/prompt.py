"""A prompt during prefill: its plan, its KV blocks, and the loader of its stored KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload
from cacheblend_cli.kv.rows import Rows, rows_of
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan


@dataclass(frozen=True)
class Prompt:
    decoder: Decoder
    plan: PromptPlan
    sequence: PagedSequence  # has capacity for at least the plan's tokens
    loader: KVLoader
    _rows: dict[int, Rows] = field(default_factory=dict, repr=False)  # by the id of their positions, which they hold

    @property
    def pool(self) -> KVPool:
        return self.sequence.pool

    @cached_property
    def token_ids(self) -> Tensor:
        """Token ids, [num_tokens] int64, on the device."""
        return upload(self.plan.token_ids, self.decoder.device)

    def rows(self, positions: Tensor) -> Rows:
        """Return the rows at `positions` (sorted int64), the same for the same tensor."""
        if (rows := self._rows.get(id(positions))) is None:
            length = self.plan.num_tokens
            rows = self._rows[id(positions)] = rows_of(self.decoder, self.sequence, positions, length, length)
        return rows
