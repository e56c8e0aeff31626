"""Decoders compute the next token of running answers. Each sequence belongs to one decoder at a time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Protocol

from cacheblend_cli.engine.core.sequence import Sequence
from cacheblend_cli.engine.core.speculation import Drafts
from cacheblend_cli.engine.worker.sampling import Draw, tokens_of
from cacheblend_cli.engine.worker.worker import DecodeInput, DecodeOutput, TableInput, Worker
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.linear import STEADY_ROWS


class DecodeBackend(Protocol):
    """A decoder beside the engine's own."""

    def takes(self, sequence: Sequence, worker: Worker) -> bool:
        """Return whether it decodes the sequence. Before its first token, it takes over the KV from the worker
        (`Sequence.elsewhere`)."""
        ...

    def batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Split sequences into batches, one per call of `decode`."""
        ...

    def decode(self, sequences: list[Sequence], pending: Mapping[Sequence, Draw], drafts: Drafts) -> DecodeOutput:
        """Compute the KV of one token of each sequence and of its proposals, and the logits after each. pending: tokens
        that are only on the device: of no sequence or of all; then there are no proposals."""
        ...


class OwnDecoder:
    """This engine's decoder, over the pool's blocks of each sequence."""

    def __init__(self, decoder: Decoder, worker: Worker) -> None:
        self._decoder, self._worker = decoder, worker

    def takes(self, sequence: Sequence, worker: Worker) -> bool:
        return True

    def batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Split at other RoPE frequencies; where torch multiplies on a CPU, into batches of the rows that a single
        sequence is padded to; one by one if rows are not steady."""
        rope, steady = self._decoder.rope, self._decoder.steady
        groups = [list(g) for _, g in groupby(sequences, key=lambda s: rope.regime(s.kv_len + 1) if steady else s)]
        if not self._decoder.multiplies_by_torch:
            return groups
        return [group[i : i + STEADY_ROWS] for group in groups for i in range(0, len(group), STEADY_ROWS)]

    def decode(self, sequences: list[Sequence], pending: Mapping[Sequence, Draw], drafts: Drafts) -> DecodeOutput:
        """A proposal is a row like that of another sequence, with the same blocks: a layer writes K and V of all rows
        before attention, and a row sees the positions up to its own."""
        token_ids, kv_lens, tables, watched = list[int](), list[int](), list[TableInput](), list[bool]()
        for sequence in sequences:
            paged, draft, kv_len = sequence.paged, drafts.get(sequence, ()), sequence.kv_len
            assert paged is not None
            num_rows = 1 + len(draft)
            paged.ensure(kv_len + num_rows)
            paged.make_writable(kv_len, kv_len + num_rows)
            token_ids += () if pending else (sequence.next_token, *draft)
            kv_lens += range(kv_len, kv_len + num_rows)
            tables += [TableInput.of(paged)] * num_rows
            watched += [sequence.watches(place) for place in range(kv_len, kv_len + num_rows)]
        given = DecodeInput(tuple(token_ids), tuple(kv_lens), tuple(tables), tuple(watched))
        return self._worker.decode(given, *([tokens_of([pending[s] for s in sequences])] if pending else []))
