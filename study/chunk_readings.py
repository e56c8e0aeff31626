"""What reading a chunk before any prompt can tell: how its K and V change behind other texts, its hidden states in
between, and which of its keys draw attention. For `nearer_ideas.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sets import musique
from torch import Tensor

from cacheblend_cli.blend.evidence import attention_weights
from cacheblend_cli.collect.prefill import ChunkKV, CollectSequence, Kept, collect, collect_prefix
from cacheblend_cli.corpus.contexts import TfIdf
from cacheblend_cli.engine.engine import Engine, Request
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.kv.forward import Steps, finish, layer_by_layer
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.rows import Rows, rows_of
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.prompt.plan import Segment

KINDS = ("unrelated", "similar")
"""Of texts that a chunk is read behind: passages of other questions in order, or the most similar ones by TF-IDF."""
READINGS, PASSAGES = {"unrelated": 4, "similar": 2}, 2
"""Texts of a kind that a chunk is read behind, and passages of each."""
BLOCK = 64


@dataclass(frozen=True)
class Reading:
    """Of one chunk of n tokens. changes: by kind, for each text before it and each layer, the change of K before RoPE
    and of V, fp32 [n, elements of K and V]. states: hidden states at the input of layers, [n, hidden_size].
    received: attention that each token's key gets from later tokens of the chunk, summed over them, fp32 [layers,
    heads, n]."""

    changes: dict[str, list[list[Tensor]]]
    states: dict[int, Tensor]
    received: Tensor
    memo: dict[Any, Any] = field(default_factory=dict)  # what variants computed of it before

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


class Watching(Steps):
    """Keeps what each key receives from later tokens in every layer. first: position of the chunk's first token."""

    def __init__(self, first: int) -> None:
        self.first, self.received = first, list[Tensor]()

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        cache, first = rows.pool, self.first
        keys = cache.keys(layer.index, rows.slots)
        if keys.dim() == 4:
            keys = keys.flatten(0, 1)
        heads = []
        for weights in attention_weights(layer, layer.to_keys(q), rows.positions, keys, 1):
            inside = weights[..., first:, first:]
            inside = inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))
            heads.append(inside.sum(-2).flatten(0, 1))
        self.received.append(torch.cat(heads))


@torch.inference_mode()
def states_of(
    decoder: Decoder, token_ids: Sequence[int], first: int, layers: Sequence[int], watch: bool = True
) -> tuple[dict[int, Tensor], Tensor]:
    """Return the hidden states at the input of these layers from position `first` on, and `Reading.received`.
    token_ids: the prefix's and the chunk's."""
    count, found, plain = len(token_ids), dict[int, Tensor](), decoder.input_norm
    pool = KVPool(decoder.own_spec, -(-count // BLOCK), BLOCK, decoder.dtype, decoder.device)
    sequence, positions = pool.new_sequence(count), torch.arange(count)
    rows, steps = rows_of(decoder, sequence, positions, count, count), Watching(first) if watch else Steps()

    def recording(layer: DecoderLayer, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        h, total = plain(layer, delta, residual)
        if layer.index in layers:
            found[layer.index] = total[first:].clone()
        return h, total

    with patch.object(decoder, "input_norm", recording):
        finish(layer_by_layer(decoder, rows, torch.tensor(token_ids), steps))
    sequence.release()
    return found, torch.stack(steps.received) if isinstance(steps, Watching) else torch.empty(0)


class Texts:
    """Texts to read chunks behind: passages of MuSiQue, each cut to `cut` tokens."""

    def __init__(self, engine: Engine, data: Path, cut: int) -> None:
        tokenizer = engine.model.tokenizer
        samples = musique(data, 10)[:75]
        self._questions = [s.question for s in samples]
        self._own = [[tuple(tokenizer.encode_text(c.text)[:cut]) for c in s.contexts] for s in samples]
        self._ids = sorted({ids for own in self._own for ids in own})
        self._number = {ids: number for number, ids in enumerate(self._ids)}
        self._similarity = TfIdf([tokenizer.decode(ids) for ids in self._ids])
        self._encode = lambda text: tuple(tokenizer.encode_text(text)[:cut])

    def unrelated(self, sample: Sample) -> list[tuple[int, ...]]:
        """Return passages of the following questions, one each, that the sample does not have."""
        own, at = {self._encode(c.text) for c in sample.contexts}, self._questions.index(sample.question)
        others = (self._own[(at + step) % len(self._own)][0] for step in range(1, len(self._own)))
        return [ids for ids in others if ids not in own][: READINGS["unrelated"] * PASSAGES]

    def similar(self, sample: Sample, text: str) -> list[tuple[int, ...]]:
        """Return the passages most similar to a text that the sample does not have, most similar first."""
        own = {self._encode(c.text) for c in sample.contexts}
        count = READINGS["similar"] * PASSAGES
        near = self._similarity.nearest(self._nearest_number(self._encode(text)), 4 * count)
        return [self._ids[number] for number in near if self._ids[number] not in own][:count]

    def _nearest_number(self, ids: tuple[int, ...]) -> int:
        """Return a passage's number; decoding and encoding again may have changed the last tokens."""
        if ids in self._number:
            return self._number[ids]
        return max(range(len(self._ids)), key=lambda n: _same_start(self._ids[n], ids))


def _same_start(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@cache
def texts_of(engine: Engine, data: Path, cut: int) -> Texts:
    return Texts(engine, data, cut)


def readings(
    engine: Engine, request: Request, sample: Sample, texts: Texts, wanted: dict[str, Any]
) -> dict[bytes, Reading]:
    """Read the chunks of a prompt but exact ones, by their keys. wanted: kinds, layers of states."""
    plan, found = request.plan, dict[bytes, Reading]()
    prefix = next(s.token_ids for s in plan.segments if s.kind == "prefix")
    for segment, context in zip(plan.chunks, sample.contexts, strict=True):
        if segment.status == "blended":
            assert segment.key is not None
            found[segment.key] = _reading(engine, prefix, segment, sample, context.text, texts, wanted)
    return found


def _reading(
    engine: Engine, prefix: tuple[int, ...], segment: Segment, sample: Sample, text: str, texts: Texts, wanted: Any
) -> Reading:
    decoder, ids, changes = engine.model.decoder, segment.token_ids, dict[str, list[list[Tensor]]]()
    alone = _collected(decoder, prefix, (), ids)
    for kind in wanted["kinds"]:
        near = texts.unrelated(sample) if kind == "unrelated" else texts.similar(sample, text)
        lefts = [near[i : i + PASSAGES] for i in range(0, len(near), PASSAGES)]
        behind = [tuple(i for part in reversed(left) for i in part) for left in lefts]
        changes[kind] = [_change(_collected(decoder, prefix, left, ids), alone) for left in behind]
    states, received = states_of(decoder, [*prefix, *ids], len(prefix), wanted["layers"])
    return Reading(changes, states, received)


def _collected(decoder: Decoder, prefix: tuple[int, ...], left: tuple[int, ...], ids: tuple[int, ...]) -> ChunkKV:
    sequence = CollectSequence((*left, *ids), (Kept(b"", len(left), len(left) + len(ids)),))
    [kv] = collect(decoder, _prefix(decoder, prefix), [sequence])
    return kv


_prefix = cache(collect_prefix)


def _change(there: ChunkKV, alone: ChunkKV) -> list[Tensor]:
    """Return the change of K and V in each layer."""
    return [
        torch.cat(((k.float() - a).flatten(1), (v.float() - b).flatten(1)), -1)
        for k, v, a, b in zip(there.k, there.v, alone.k, alone.v, strict=True)
    ]
