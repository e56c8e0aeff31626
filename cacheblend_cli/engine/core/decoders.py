"""Decoders compute the next token of running answers. Each sequence belongs to one decoder at a time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Protocol

from cacheblend_cli.engine.core.sequence import Sequence
from cacheblend_cli.engine.worker.sampling import Draw, tokens_of
from cacheblend_cli.engine.worker.worker import DecodeInput, DecodeOutput, TableInput, Worker
from cacheblend_cli.model.decoder import Decoder


class DecodeBackend(Protocol):
    """A decoder beside the engine's own."""

    def takes(self, sequence: Sequence, worker: Worker) -> bool:
        """Return whether it decodes the sequence. Before its first token, it takes over the KV from the worker
        (`Sequence.elsewhere`)."""
        ...

    def batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Split sequences into batches, one per call of `decode`."""
        ...

    def decode(self, sequences: list[Sequence], pending: Mapping[Sequence, Draw]) -> DecodeOutput:
        """Compute the KV of one token of each sequence, and the logits after it. pending: tokens that are only on the
        device: of no sequence or of all."""
        ...


class OwnDecoder:
    """This engine's decoder, over the pool's blocks of each sequence."""

    def __init__(self, decoder: Decoder, worker: Worker) -> None:
        self._decoder, self._worker = decoder, worker

    def takes(self, sequence: Sequence, worker: Worker) -> bool:
        return True

    def batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Split at other RoPE frequencies; one by one if rows are not steady."""
        rope, steady = self._decoder.rope, self._decoder.steady
        groups = groupby(sequences, key=lambda s: rope.regime(s.kv_len + 1) if steady else s)
        return [list(group) for _, group in groups]

    def decode(self, sequences: list[Sequence], pending: Mapping[Sequence, Draw]) -> DecodeOutput:
        parts = [(s, s.paged) for s in sequences if s.paged is not None]
        for sequence, paged in parts:
            paged.ensure(sequence.kv_len + 1)
            paged.make_writable(sequence.kv_len, sequence.kv_len + 1)
        given = DecodeInput(
            () if pending else tuple(s.next_token for s, _ in parts),
            tuple(s.kv_len for s, _ in parts),
            tuple(TableInput.of(paged) for _, paged in parts),
            tuple(not s.replay and any(hook.watches(s.index) for hook in s.state.hooks) for s, _ in parts),
        )
        return self._worker.decode(given, *([tokens_of([pending[s] for s, _ in parts])] if pending else []))
