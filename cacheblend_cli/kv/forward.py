"""The one forward pass: rows through the layers over the paged KV cache.

Full prefill, collect, the four statuses of a blended prefill, the question's probe and decoding differ only in their
`Steps`, which choose per layer the rows that get fresh K and V and the rows that continue, and observe a layer's
results. A pass can pause between two layers (`layer_by_layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.linear import decoding

T = TypeVar("T")
Pass = Generator[int, None, T]
"""A computation that pauses between layers: yields the number of rows of the layer just computed, returns its
result."""


@dataclass(frozen=True)
class FreshKV:
    """Results of a layer before they are written to the pool. Only some of the rows may get fresh K and V: n of
    num_rows."""

    layer: DecoderLayer
    rows: Rows
    h: Tensor  # normed input of the rows, [num_rows, hidden_size]
    k: Tensor  # before RoPE, [n, num_kv_heads, head_dim]; with latent attention position keys [n, 1, rope_dim]
    v: Tensor  # [n, num_kv_heads, head_dim]; with latent attention latents [n, 1, rank]


@dataclass(frozen=True)
class LayerStep:
    """Rows processed by one layer. An index is [n] int64, sorted, into the incoming rows."""

    kv_rows: Tensor | None = None  # rows that get fresh K and V; None = all; other rows keep their stored KV
    kv_taken: Rows | None = None  # these rows, if they are known already
    # rows that continue to Q, attention and MLP; None = all; empty ends the pass; a function if it depends on the fresh
    # K and V
    next_rows: Tensor | Callable[[FreshKV], Tensor] | None = None
    stop: bool = False  # end the pass after the queries were observed


class LayerWork:
    """Launches of `Steps` in a layer that a CUDA graph can hold, here none. They read no values on the host. A graph
    holds a `twin`, whose tensors outlive the pass and are as long as a bucket's passes need."""

    key: Hashable = None  # work with the same key can share a graph

    def twin(self, num_rows: int, context: int) -> Self:
        """Return work of the same key for passes of up to num_rows rows over `context` positions."""
        return self

    def reset(self) -> None:
        """Let a twin change nothing."""

    def enter(self, twin: Self, rows: Rows) -> None:
        """Copy the values of a pass over `rows` to the twin, which replaces this work until `leave`."""

    def leave(self) -> None:
        """Keep what the twin has found: another pass takes it."""

    def fresh(self, fresh: FreshKV) -> None:
        """`Steps.fresh`."""

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        """`Steps.queries`."""


NO_WORK = LayerWork()


class Steps:
    """Steps of a pass: every row at every layer, as in a full prefill or a decode step. Every method is called once per
    layer; subclasses override the rows of a layer, or observe its results. Tensors are valid until the method
    returns."""

    def at(self, layer: DecoderLayer) -> LayerStep:
        """Return the rows of this layer. Called when the layer begins; may wait for the layer's stored KV."""
        return LayerStep()

    def fresh(self, fresh: FreshKV) -> None:
        """Called when K and V are computed; the pool still holds the old values. Not called in a layer that uses
        another layer's."""

    def outputs(self) -> Tensor | None:
        """Return the rows [n] int64 whose results are needed, where layers without K and V follow the last one with
        them; None = all."""
        return None

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        """Called when K and V are in the pool. q: rotated, [num_rows, num_heads, head_dim], of the rows that
        continue."""

    def attended(self, layer: DecoderLayer, output: Tensor) -> None:
        """Called after attention. output: before o_proj, [num_rows, num_heads, head_dim]."""

    def work(self, layer: DecoderLayer) -> LayerWork | None:
        """Return the layer's `fresh` and `queries` for a graph, which calls them in their place; None if there must be
        no graph."""
        own, base = type(self), Steps
        alike = own.fresh is base.fresh and own.queries is base.queries and own.attended is base.attended
        return NO_WORK if alike else None


class KVOnly(Steps):
    """Every row at every layer, nothing after the last K and V: collect needs no logits."""

    def __init__(self, decoder: Decoder, rows: Rows) -> None:
        self._last, self._none = last_narrowing(decoder), rows.positions[:0]

    def at(self, layer: DecoderLayer) -> LayerStep:
        return LayerStep(next_rows=self._none if layer.index == self._last else None)


def last_narrowing(decoder: Decoder) -> int:
    """Return the layer after whose K and V only rows with an output are needed; -1 if layers follow that need them
    all."""
    return decoder.spec.num_kv_layers - 1 if decoder.after is None else -1


class Activations:
    """Results of a layer that the next one takes. In the buffers of `LayerGraphs` they are shared: another pass that
    needs the buffers moves them out."""

    def __init__(self, delta: Tensor) -> None:
        self.put(delta, None)

    def put(self, delta: Tensor, residual: Tensor | None, shared: bool = False) -> None:
        """delta, residual: see `Hidden`; residual is None before the first layer."""
        self._held, self.shared = [(delta, residual)], shared

    def take(self) -> tuple[Tensor, Tensor | None]:
        """Return delta and residual, copied if they are shared, and hold them no longer."""
        delta, residual = self._held.pop()
        if not self.shared:
            return delta, residual
        self.shared = False
        return delta.clone(), None if residual is None else residual.clone()


@dataclass(frozen=True)
class Hidden:
    """End of a pass."""

    delta: Tensor  # the last layer's addition to the residual stream, [num_rows, hidden_size]
    residual: Tensor  # residual stream, [num_rows, hidden_size]
    decode: bool  # of a decode step

    def logits(self, decoder: Decoder, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return logits, fp32 [num_rows, vocab_size]."""
        with decoding(self.decode):
            return decoder.logits(self.delta[rows], self.residual[rows])


def forward(decoder: Decoder, rows: Rows, token_ids: Tensor, steps: Steps | None = None) -> Tensor:
    """Compute every row at every layer. token_ids: [num_rows] int64. Returns fp32 logits [num_rows, vocab_size].

    Reads no values on the host (except for the torch backend's attention), so a CUDA graph can capture it.
    """
    hidden = finish(layer_by_layer(decoder, rows, token_ids, steps or Steps()))
    assert hidden is not None
    return hidden.logits(decoder)


def finish(run: Generator[Any, None, T]) -> T:
    """Run a paused computation to its end and return its result."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            result: T = end.value
            return result


def layer_by_layer(decoder: Decoder, rows: Rows, token_ids: Tensor, steps: Steps) -> Pass[Hidden | None]:
    """Run rows through the layers as directed by `steps`, writing fresh K and V to the pool. Returns None if a step
    ended the pass. Pauses after every layer but the last, so that other sequences can be computed meanwhile."""
    graphs, num_rows = rows.pool.layer_graphs, 0
    rows, between = replace(rows, token_ids=token_ids), Activations(decoder.embed(token_ids))
    for layer in decoder.layers:
        if layer is not decoder.layers[0]:
            yield num_rows
        step, num_rows = steps.at(layer), len(rows)
        if layer.before is not None:
            assert rows.states is not None
            between.put(layer.before(between.take()[0], rows.states), None)
        if graphs is not None and graphs(layer, between, rows, step, steps):
            if step.stop:
                return None
            continue
        with decoding(rows.decode):
            # no name holds delta: tensors are freed before attention and MLP, activations are most of a pass's memory
            h, residual = decoder.input_norm(layer, *between.take())
            q, rows, residual = _project(layer, h, residual, rows, step, steps)
            del h
            if q is None:
                _close_states(rows)
                return None
            steps.queries(layer, q, rows)
            if step.stop:
                return None
            output = attend(layer, q, rows)
            del q
            steps.attended(layer, output)
            between.put(*layer.finish(output, residual, rows.token_ids))
            del output, residual
    delta, last = between.take()
    if decoder.after is not None:
        assert rows.states is not None
        delta, kept = decoder.after(delta, rows.states), steps.outputs()
        delta = last = delta if kept is None else delta[kept]
    _close_states(rows)
    assert last is not None
    return Hidden(delta, last, rows.decode)


def _close_states(rows: Rows) -> None:
    """Keep the recurrent states after the rows."""
    if rows.states is not None:
        rows.states.close()


def _project(
    layer: DecoderLayer, h: Tensor, residual: Tensor, rows: Rows, step: LayerStep, steps: Steps
) -> tuple[Tensor | None, Rows, Tensor]:
    """Project, and write K and V. Returns the rotated q of the rows that continue (None: none do), these rows, and
    their residual."""
    if not layer.own_kv:
        if step.next_rows is not None:
            assert not callable(step.next_rows), "there is no fresh KV to choose by"
            h, rows, residual = h[step.next_rows], rows.take(step.next_rows), residual[step.next_rows]
        return queries(layer, h, rows), rows, residual
    if step.kv_rows is None and step.next_rows is None:  # one product, and one kernel that rotates and writes
        q, k, v = layer.project_qkv(h)
        steps.fresh(FreshKV(layer, rows, h, k, v))
        rotated = rotate_and_write(layer, q, k, v, rows)
        assert rotated is not None
        return layer.scale_queries(rotated, rows.positions), rows, residual
    if step.kv_rows is None:
        kv_rows, (k, v) = rows, layer.project_kv(h)
    else:
        kv_rows = rows.take(step.kv_rows) if step.kv_taken is None else step.kv_taken
        k, v = layer.project_kv(h[step.kv_rows])
    fresh = FreshKV(layer, rows, h, k, v)
    steps.fresh(fresh)
    going = step.next_rows(fresh) if callable(step.next_rows) else step.next_rows
    write_kv(layer, k, v, kv_rows)
    if going is not None:
        if not len(going):
            return None, rows, residual
        h, rows, residual = h[going], rows.take(going), residual[going]
    return queries(layer, h, rows), rows, residual


def attend(layer: DecoderLayer, q: Tensor, rows: Rows) -> Tensor:
    """Attention of rotated q [num_rows, num_heads, head_dim] over the layer's pool, causal by position. Returns
    [num_rows, num_heads, head_dim of V]."""
    cache, latent = rows.pool.layers[layer.index], layer.latent_heads
    if latent is not None:
        return layer.kernels.latent_attention(q, cache, rows.attention, layer.attention, latent)
    if rows.decode:
        return layer.kernels.decode_attention(q, cache, rows.attention, layer.attention)
    return layer.kernels.prefill_attention(q, cache, rows.attention, layer.attention)


def queries(layer: DecoderLayer, h: Tensor, rows: Rows) -> Tensor:
    """Return q [num_rows, num_heads, head_dim] of the rows' normed input, ready for attention."""
    return layer.scale_queries(rotate(layer, layer.project_q(h), rows), rows.positions)


def rotate(layer: DecoderLayer, x: Tensor, rows: Rows) -> Tensor:
    """Rotate q or K [num_rows, heads, head_dim] to the rows' positions. Of a wider q only the last channels are
    rotated."""
    rest = 0 if layer.latent_heads is None else x.shape[-1] - layer.head_dim
    if not rest:
        return layer.kernels.rope(x, *rows.cos_sin(layer))
    return torch.cat((x[..., :rest], layer.kernels.rope(x[..., rest:], *rows.cos_sin(layer))), -1)


def write_kv(layer: DecoderLayer, k: Tensor, v: Tensor, rows: Rows) -> None:
    """Rotate K, and write K and V to the rows' slots of the layer."""
    rotate_and_write(layer, None, k, v, rows)


def rotate_and_write(layer: DecoderLayer, q: Tensor | None, k: Tensor, v: Tensor, rows: Rows) -> Tensor | None:
    """Return the rotated q. Writes K (rotated) and V to the rows' slots of the layer."""
    slots = rows.mappings[layer.rope]
    if q is not None and layer.latent_heads is not None:  # RoPE rotates only a part of it
        layer.kernels.rope_and_cache(None, k, v, rows.pool.layers[layer.index], slots)
        return rotate(layer, q, rows)
    return layer.kernels.rope_and_cache(q, k, v, rows.pool.layers[layer.index], slots)
