"""The one forward pass: rows through the layers over the paged KV cache.

A pass is told at each layer which of its rows get fresh K and V and which of them go on (`LayerStep`). Full prefill,
collect, the four statuses of a blended prefill, the look at the question and decoding differ in nothing else; what else
they want to know they see as observers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cacheblend_kernels import Slots
from torch import Tensor

from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import Decoder, DecoderLayer


@dataclass(frozen=True)
class FreshKV:
    """What a layer has computed of its rows before any of it is written.

    h: the rows' normed input [num_rows, hidden_size]. k (before RoPE), v: [n, num_kv_heads, head_dim], of the rows that
    get fresh K and V.
    """

    layer: DecoderLayer
    rows: Rows
    h: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class LayerStep:
    """What one layer does. An index is [n] int64, sorted, into the rows that come in.

    kv_rows: the rows that get fresh K and V, None for all; the others' K and V stand. next_rows: those that go on to Q,
    attention and MLP, None for all, and none at all ends the pass; where that depends on the fresh K and V, a function of
    them. stop: the pass ends once the queries were seen.
    """

    kv_rows: Tensor | None = None
    next_rows: Tensor | Callable[[FreshKV], Tensor] | None = None
    stop: bool = False


class Steps(Protocol):
    def at(self, layer: DecoderLayer) -> LayerStep:
        """What this layer does. It is asked when the layer begins, and may wait for the layer's stored KV."""
        ...


class Observer:
    """Sees a pass. Every method is called once a layer, and here does nothing."""

    def fresh(self, fresh: FreshKV) -> None:
        """K and V are computed, and the pool still holds the old ones."""

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        """q: rotated, [num_rows, num_heads, head_dim], of the rows that go on. Their K and V are in the pool."""

    def attended(self, layer: DecoderLayer, output: Tensor) -> None:
        """output: of attention, before o_proj, [num_rows, num_heads, head_dim]."""


class AllRows:
    """Every row at every layer: a full prefill, or a decode step."""

    def at(self, layer: DecoderLayer) -> LayerStep:
        return LayerStep()


class KVOnly:
    """Every row at every layer, and nothing after the last layer's K and V: collect needs no answer."""

    def __init__(self, decoder: Decoder, rows: Rows) -> None:
        self._last, self._none = len(decoder.layers) - 1, rows.positions[:0]

    def at(self, layer: DecoderLayer) -> LayerStep:
        return LayerStep(next_rows=self._none if layer.index == self._last else None)


@dataclass(frozen=True)
class Hidden:
    """Where a pass ended: the residual stream [num_rows, hidden_size], and what the last layer adds to it."""

    delta: Tensor
    residual: Tensor

    def logits(self, decoder: Decoder, rows: slice = slice(None)) -> Tensor:
        """fp32 [num_rows, vocab_size]."""
        return decoder.logits(self.delta[rows], self.residual[rows])


def forward(decoder: Decoder, rows: Rows, token_ids: Tensor, observer: Observer | None = None) -> Tensor:
    """Compute every row at every layer. token_ids: [num_rows] int64. Returns fp32 logits [num_rows, vocab_size].

    Nothing in it looks at a value on the host (the torch backend's attention aside), so a CUDA graph can hold it.
    """
    hidden = run_layers(decoder, rows, token_ids, AllRows(), observer)
    assert hidden is not None
    return hidden.logits(decoder)


def run_layers(
    decoder: Decoder, rows: Rows, token_ids: Tensor, steps: Steps, observer: Observer | None = None
) -> Hidden | None:
    """Run rows through the layers as `steps` say, writing fresh K and V to the pool. None where a step ended the pass."""
    seen = observer or Observer()
    delta, residual = decoder.embed(token_ids), None
    for layer in decoder.layers:
        step = steps.at(layer)
        h, residual = decoder.input_norm(layer, delta, residual)
        del delta  # what is not needed any more goes before attention and MLP: activations are most of a pass's memory
        q, rows, residual = _project(layer, h, residual, rows, step, seen)
        del h
        if q is None:
            return None
        seen.queries(layer, q, rows)
        if step.stop:
            return None
        output = attend(layer, q, rows)
        del q
        seen.attended(layer, output)
        delta, residual = layer.finish(output, residual)
        del output
    assert residual is not None
    return Hidden(delta, residual)


def _project(
    layer: DecoderLayer, h: Tensor, residual: Tensor, rows: Rows, step: LayerStep, observer: Observer
) -> tuple[Tensor | None, Rows, Tensor]:
    """Project, and write K and V. Returns the rotated q of the rows that go on (None: of none), the rows, their residual."""
    if step.kv_rows is None and step.next_rows is None:  # one product, and one kernel that rotates and writes
        q, k, v = layer.project_qkv(h)
        observer.fresh(FreshKV(layer, rows, h, k, v))
        rotated = rotate_and_write(layer, q, k, v, rows)
        assert rotated is not None
        return layer.grown(rotated, rows.positions), rows, residual
    if step.kv_rows is None:
        kv_rows, (k, v) = rows, layer.project_kv(h)
    else:
        kv_rows, (k, v) = rows.take(step.kv_rows), layer.project_kv(h[step.kv_rows])
    fresh = FreshKV(layer, rows, h, k, v)
    observer.fresh(fresh)
    going = step.next_rows(fresh) if callable(step.next_rows) else step.next_rows
    write_kv(layer, k, v, kv_rows)
    if going is not None:
        if not len(going):
            return None, rows, residual
        h, rows, residual = h[going], rows.take(going), residual[going]
    return queries(layer, h, rows), rows, residual


def attend(layer: DecoderLayer, q: Tensor, rows: Rows) -> Tensor:
    """Attention of rotated q [num_rows, num_heads, head_dim] over the layer's pool, causal by position."""
    cache = rows.pool.layers[layer.index]
    if rows.decode:
        return layer.kernels.decode_attention(q, cache, rows.attention, layer.attention)
    return layer.kernels.prefill_attention(q, cache, rows.attention, layer.attention)


def queries(layer: DecoderLayer, h: Tensor, rows: Rows) -> Tensor:
    """q [num_rows, num_heads, head_dim] of the rows' normed input, as attention takes it."""
    return layer.grown(rotate(layer, layer.project_q(h), rows), rows.positions)


def rotate(layer: DecoderLayer, x: Tensor, rows: Rows) -> Tensor:
    """q or K of the rows [num_rows, heads, head_dim], rotated to their positions."""
    return layer.kernels.rope(x, *rows.cos_sin(layer))


def write_kv(layer: DecoderLayer, k: Tensor, v: Tensor, rows: Rows) -> None:
    """Rotate K and write both to the rows' slots of the layer."""
    rotate_and_write(layer, None, k, v, rows)


def rotate_and_write(layer: DecoderLayer, q: Tensor | None, k: Tensor, v: Tensor, rows: Rows) -> Tensor | None:
    """The rotated q; K, rotated, and V are in the rows' slots of the layer."""
    slots = Slots(rows.slots, *rows.cos_sin(layer))
    return layer.kernels.rope_and_cache(q, k, v, rows.pool.layers[layer.index], slots)
