"""Which of its sources an answer looked at: the share of its attention that each chunk got while it was decoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.blend.evidence import attention_weights
from cacheblend_cli.kv.forward import Observer
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan

EVERY = 4
"""Of the tokens that are decoded one in so many is looked at, the first among them."""
_DEEP = 12  # layers from which on two are watched


class AttentionShares:
    """Adds up what an answer's tokens attend to in the layer half way up, and in a deep model in the one three quarters up.

    Only layers without a sliding window are watched, where there are any. It costs a product of a row with K in those
    layers at one step of EVERY: a hundredth of decoding with a model of 135 M parameters.
    """

    def __init__(self, decoder: Decoder, plan: PromptPlan) -> None:
        every = [layer.index for layer in decoder.layers]
        wide = [i for i in every if decoder.layers[i].attention.sliding_window is None] or every
        self._layers = sorted({wide[len(wide) // 2], *([wide[len(wide) * 3 // 4]] if len(wide) >= _DEEP else ())})
        self._plan, self._num_steps = plan, 0
        self._found = torch.zeros(plan.num_tokens, device=decoder.device)

    def wants(self, layer: DecoderLayer) -> bool:
        """Whether to `look` here. It is to be asked at every layer of every step."""
        self._num_steps += layer.index == self._layers[0]
        return layer.index in self._layers and self._num_steps % EVERY == 1

    def look(self, layer: DecoderLayer, q: Tensor, sequence: PagedSequence, kv_len: int) -> None:
        """q: of the answer's newest token, [num_heads, head_dim], which sees the positions 0:kv_len of the sequence."""
        self._found += _weights(layer, q, sequence, kv_len)[: len(self._found)]

    def of_chunks(self) -> list[float] | None:
        """Of each chunk of the prompt, in order, its share of what was looked at in all of them; None before any step."""
        looks = [float(self._found[chunk.start : chunk.end].sum()) for chunk in self._plan.chunks]
        total = sum(looks)
        return [look / total for look in looks] if total > 0 else None


class Watch(Observer):
    """Shows the steps of a decode, a row a sequence, to who wants to see them. Rows behind the last of them only fill up."""

    def __init__(self, parts: Sequence[tuple[AttentionShares | None, PagedSequence]]) -> None:
        self._parts = parts

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        for row, (shares, sequence) in enumerate(self._parts):
            if shares is not None and shares.wants(layer):
                shares.look(layer, q[row], sequence, int(rows.positions[row]) + 1)


def _weights(layer: DecoderLayer, q: Tensor, sequence: PagedSequence, kv_len: int) -> Tensor:
    """The mean over heads of q's attention [num_heads, head_dim] to positions 0:kv_len, [kv_len] fp32."""
    keys = sequence.pool.read_k(layer.index, sequence.slots_to(kv_len))
    at = torch.full((1,), kv_len - 1, device=q.device)
    (weights,) = attention_weights(layer, q[None], at, keys, at_once=keys.shape[1])
    return weights.mean((0, 1, 2))
