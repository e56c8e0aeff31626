"""Measure properties of a layer that config.json lacks by calling it: heads, scale, window, and RoPE's rotation of q
and k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from cacheblend_kernels import AttentionParams
from cacheblend_kernels.torch_backend import TorchBackend
from torch import Tensor

from cacheblend_cli.model.generic.parts import GenericModule, LayerCall, Parts
from cacheblend_cli.model.generic.recurrent import RecurrentLayers
from cacheblend_cli.model.generic.seam import KeyRule, Projected
from cacheblend_cli.model.rope import RotaryEmbedding
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.weights import head_order

PROBES = 12  # number of positions, up to the last one of the context
# tolerance relative to the largest entry: bf16 rounds to a tenth of it, another RoPE is off by its whole rotation
TELLS_APART = 0.03


@dataclass(frozen=True)
class _Probe:
    """Projections of a layer at some positions, with RoPE and without."""

    plain: Projected
    turned: Projected


@dataclass(frozen=True)
class Measured:
    spec: ModelSpec  # with the measured properties
    modules: list[GenericModule]  # the layers with K and V
    attention: list[AttentionParams]  # of each of them
    recurrent: list[RecurrentLayers]  # of a hybrid: the layers before each of them, and after the last
    initial: Tensor  # input of the first layer at some positions, [PROBES, hidden_size]


def measure(spec: ModelSpec, parts: Parts) -> Measured:
    """Measure a model's layers. Raises UsageError, with the reason, if they compute something unsupported."""
    positions = probed_positions(spec, parts.model.device)
    embedded = parts.embed(torch.arange(len(positions), device=positions.device) % spec.vocab_size)
    calls = parts.calls(embedded, positions)
    every = [GenericModule(layer, call) for layer, call in zip(parts.layers, calls, strict=True)]
    if not spec.recurrent and any(module.rope is None for module in every):
        raise parts.refused("its layers do not get RoPE as cos and sin")
    with_kv = layers_with_kv(spec)
    recurrent, modules = _recurrent(spec, every), [every[i] for i in with_kv]
    probes = [_probe(parts, i, every[i], calls[i], embedded) for i in with_kv]
    windows = tuple(_window(parts, i, calls[i], spec.max_context) for i in with_kv)
    spec = replace(_with_heads(spec, parts, probes), sliding_windows=windows)
    turns = [list(_turns_of(spec, i, probe, positions)) for i, probe in enumerate(probes)]
    for interleaved in (False, True):  # channels i and i + half, then neighbours
        if all(interleaved in found or None in found for found in turns):
            unrotated = tuple(i for i, found in enumerate(turns) if None in found)
            attention = [_attention(spec, p.plain, w) for p, w in zip(probes, windows, strict=True)]
            spec = replace(spec, interleaved=interleaved, unrotated=unrotated)
            return Measured(spec, modules, attention, recurrent, embedded)
    raise parts.refused("its RoPE turns q and k in a way that is not known, or something follows it")


def layers_with_kv(spec: ModelSpec) -> list[int]:
    """Return the indexes of the layers with K and V among all of the model's layers."""
    return [
        i + before for i, before in enumerate(accumulate(spec.recurrent[: spec.num_layers] or (0,) * spec.num_layers))
    ]


def _recurrent(spec: ModelSpec, every: Sequence[GenericModule]) -> list[RecurrentLayers]:
    """Return the layers without K and V before each layer with them, and after the last."""
    groups, at, first = list[RecurrentLayers](), 0, 0
    for count in spec.recurrent:
        groups.append(RecurrentLayers(first, every[at : at + count]))
        at, first = at + count + 1, first + count
    return groups


def probed_positions(spec: ModelSpec, device: torch.device) -> Tensor:
    """Return [PROBES] int64, sorted: the first positions, and others up to the context's last."""
    last = spec.max_context - 1
    near, far = torch.arange(min(4, last + 1)), torch.linspace(min(5, last), last, PROBES - 4).long()
    return torch.cat((near, far)).unique().to(device)


def turns_as_ours(
    spec: ModelSpec, layer: int, plain: Projected, turned: Projected, positions: Tensor, share: float
) -> bool:
    """Return whether the layer rotates q and k by our RoPE, up to a share of the largest entry. plain, turned: its
    projections at positions [num_rows] int64, without RoPE and with it."""
    rope = RotaryEmbedding(spec.rope_of(layer), spec.head_dim, spec.max_position_embeddings, positions.device)
    cos, sin = rope.at(positions, int(positions[-1]) + 1)
    order = head_order(spec) or slice(None)  # of the channels
    pairs = ((x[..., order].float() for x in pair) for pair in ((plain.q, turned.q), (plain.k, turned.k)))
    return all(is_close(TorchBackend().rope(before, cos, sin), after, share) for before, after in pairs)


def is_close(ours: Tensor, theirs: Tensor, share: float) -> bool:
    """Return whether both agree up to a share of the largest entry."""
    return float((ours - theirs.float()).abs().max()) <= share * float(theirs.float().abs().max())


def _probe(parts: Parts, index: int, module: GenericModule, call: LayerCall, hidden: Tensor) -> _Probe:
    try:
        plain = module.project(hidden)
    except LookupError:
        raise parts.refused(f"layer {index} is not attention, or does not go through AttentionInterface") from None
    return _Probe(plain, module.project(hidden, call.get("position_embeddings")))


def _with_heads(spec: ModelSpec, parts: Parts, probes: list[_Probe]) -> ModelSpec:
    shapes = {(p.plain.q.shape[1:], p.plain.k.shape[1:], p.plain.v.shape[1:]) for p in probes}
    if len(shapes) > 1:
        raise parts.refused("its layers have heads of different numbers or sizes")
    q, k, v = shapes.pop()
    if not q[1] == k[1] == v[1]:
        raise parts.refused(f"its heads have {k[1]} channels of K and {v[1]} of V")
    if k[1] % 2 or q[0] % k[0] or k[0] != v[0]:
        raise parts.refused(f"it has {q[0]} heads for {k[0]} KV heads of {k[1]} channels")
    return replace(spec, num_heads=q[0], num_kv_heads=k[0], head_dim=k[1])


def _window(parts: Parts, index: int, call: LayerCall, length: int) -> int | None:
    rule: Any = call.get("attention_mask")
    if not isinstance(rule, KeyRule):
        raise parts.refused(f"the mask of layer {index} does not come from transformers' mask functions")
    try:
        return rule.window(length)
    except ValueError:
        raise parts.refused(f"layer {index} hides other keys than later ones and those outside a window") from None


def _turns_of(spec: ModelSpec, layer: int, probe: _Probe, positions: Tensor) -> Iterator[bool | None]:
    """Yield the rotations that explain the layer's output: False for channels i and i + half, True for neighbours, None
    for no rotation."""
    plain, turned = probe.plain, probe.turned
    if torch.equal(plain.q, turned.q) and torch.equal(plain.k, turned.k):
        yield None
        return
    for interleaved in (False, True):
        if turns_as_ours(replace(spec, interleaved=interleaved), layer, plain, turned, positions, TELLS_APART):
            yield interleaved


def _attention(spec: ModelSpec, projected: Projected, window: int | None) -> AttentionParams:
    scale = spec.head_dim**-0.5 if projected.scale is None else float(projected.scale)
    sinks = None if projected.sinks is None else projected.sinks.float().flatten()
    return AttentionParams(scale, window, projected.soft_cap, sinks)
