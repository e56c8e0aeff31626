"""Attention of decoded tokens, observed in one or two layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.blend.evidence import attention_weights
from cacheblend_cli.kv.forward import Steps
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import Decoder, DecoderLayer

_DEEP = 12  # minimum layers for observing two of them


class AttentionObserver(Steps):
    """Observes the attention of a decode step's tokens, in the middle layer, and in deep models also the one at three
    quarters; among layers without a sliding window, if there are any.

    sequences: one per row, None for rows that are not observed; further rows are padding. kv_lens: tokens before each
    row. found: attention of each sequence, [kv_len + 1] fp32, None if it was not observed.
    """

    def __init__(self, decoder: Decoder, sequences: Sequence[PagedSequence | None], kv_lens: Sequence[int]) -> None:
        every = [layer.index for layer in decoder.layers]
        wide = [i for i in every if decoder.layers[i].attention.sliding_window is None] or every
        self._layers = {wide[len(wide) // 2], *([wide[len(wide) * 3 // 4]] if len(wide) >= _DEEP else ())}
        self._sequences, self._kv_lens = sequences, kv_lens
        self.found: list[Tensor | None] = [None] * len(sequences)

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        if layer.index not in self._layers:
            return
        for row, sequence in enumerate(self._sequences):
            if sequence is not None:
                weights, known = _weights(layer, q[row], sequence, self._kv_lens[row] + 1), self.found[row]
                weights = layer.part.ranks.sum(weights) / layer.part.ranks.size
                self.found[row] = weights if known is None else known + weights


def _weights(layer: DecoderLayer, q: Tensor, sequence: PagedSequence, kv_len: int) -> Tensor:
    """Return the mean over heads of the attention of q [num_heads, head_dim] to positions 0:kv_len, [kv_len] fp32."""
    keys = sequence.pool.keys(layer.index, sequence.slots_to(kv_len))
    at = torch.full((1,), kv_len - 1, device=q.device)
    (weights,) = attention_weights(layer, layer.to_keys(q[None]), at, keys, at_once=keys.shape[1])
    return weights.mean((0, 1, 2))
