"""Check models on the generic path against transformers, on random tokens, when a model is first loaded.

Finds properties that no config states, in any architecture: rows that depend on their neighbours, positions added to
tokens, scores changed outside attention's arguments. A model that fails is refused.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from cacheblend_cli import user_cache
from cacheblend_cli.kv.forward import attend, queries, write_kv
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.generic.decoder import GenericDecoder, GenericLayer
from cacheblend_cli.model.generic.measure import is_close, layers_with_kv, probed_positions, turns_as_ours
from cacheblend_cli.model.generic.parts import GenericModule, LayerCall
from cacheblend_cli.model.generic.recurrent import RecurrentLayers
from cacheblend_cli.model.states import LaunchStates, SequenceState

FORMAT = 1  # version of the check: increase it when the check covers more
PASSED = "passed"
TOKENS, BLOCK_SIZE = 24, 16
FAR = 1 << 16  # shift to far positions, where position-dependent scores have grown
SHARE = 1e-4  # tolerance relative to the largest change by a layer: rounding in fp32
STREAM = 1e-6  # tolerance relative to the residual stream, which may be far larger than a layer's change
SAME = 2e-2  # tolerance relative to the largest logit: the same products over other numbers of rows in bf16


def check_once(decoder: Decoder, fingerprint: str) -> None:
    """Run `check_generic` and cache success in the user's cache. For a model of a few billion weights the check takes
    as long as a prompt of about 200 tokens. fingerprint: identifies the model, dtype included."""
    versions = [importlib.metadata.version(name) for name in ("cacheblend", "transformers", "torch")]
    passed = user_cache.place("generic", FORMAT, fingerprint, decoder.device.type, decoder.kernels.name, *versions)
    if user_cache.recall(passed) == PASSED:
        return
    assert isinstance(decoder, GenericDecoder)
    check_generic(decoder)
    user_cache.keep(passed, PASSED)


@torch.inference_mode()
def check_generic(decoder: GenericDecoder) -> None:
    """Compare with transformers: a full prefill, and a prefill of some rows over the KV of the others. Raises
    UsageError with the reason if they differ.

    Layers are compared one by one, in fp32 whatever the model's dtype.
    """
    parts, device, demand = decoder.parts, decoder.device, partial(_demand, decoder)
    count = min(TOKENS, decoder.spec.max_context)
    ids = torch.randint(decoder.spec.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(count, device=device)
    came, went, logits = _by_transformers(decoder, ids)
    embedded = decoder.embed(ids)
    demand(torch.equal(embedded, came[0]), "the input of its first layer changes from run to run")
    later = parts.embed(ids, positions + decoder.spec.max_context - count)
    demand(torch.equal(later, embedded), "it adds something to tokens that depends on their positions")
    some = positions[::3]
    demand(torch.equal(parts.embed(ids[some]), embedded[some]), "its token embeddings depend on earlier tokens")
    for out, into in zip(went[:-1], came[1:], strict=True):
        demand(torch.equal(out, into), "it changes the residual stream between layers")
    last = went[-1][some]
    demand(
        is_close(decoder.logits(last, last), logits[some], SAME), "after its last layer, a row depends on other rows"
    )
    spread, shift = probed_positions(decoder.spec, device), min(decoder.spec.max_context - count, FAR)
    near, far = (parts.calls(embedded.float(), positions + by, "eager") for by in (0, shift))
    turns = parts.calls(embedded[:1].float().expand(len(spread), -1), spread)
    for index, module in decoder.recurrent_modules:
        _check_recurrent(decoder, module.in_float32(near[index]), came[index].float(), near[index], index)
    for index, layer in zip(layers_with_kv(decoder.spec), decoder.generic_layers, strict=True):
        exact, rows = layer.in_float32(near[index]), came[index].float()
        _check_layer(decoder, exact, rows, near[index], 0)
        _check_layer(decoder, exact, rows, far[index], shift)
        _check_turns(decoder, exact, rows, turns[index], spread)


def _by_transformers(decoder: GenericDecoder, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Run transformers' own forward pass. Returns inputs and outputs of each layer [num_rows, hidden_size], and the
    logits [num_rows, vocab_size]."""
    came: list[Tensor] = []
    went: list[Tensor] = []

    def before(module: object, given: tuple[Tensor, ...], named: LayerCall) -> None:
        came.append((given[0] if given else named["hidden_states"])[0].clone())

    def after(module: object, given: object, output: Tensor | tuple[Tensor, ...]) -> None:
        went.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    parts = decoder.parts
    hooks = [h for m in parts.layers for h in (m.register_forward_pre_hook(before, with_kwargs=True), m.register_forward_hook(after))]  # fmt: skip
    try:
        with parts.attention("eager"):
            logits = parts.model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return came, went, logits


def _check_layer(decoder: GenericDecoder, layer: GenericLayer, came: Tensor, call: LayerCall, shift: int) -> None:
    """Compare one layer. call: the layer's arguments with rows at positions shift, shift + 1, ..."""
    with decoder.parts.attention("eager"):
        theirs = layer.module.whole(came, call)
    one = replace(decoder.spec, num_layers=layer.index + 1)
    pool = KVPool(one, -(-len(came) // BLOCK_SIZE), BLOCK_SIZE, torch.float32, decoder.device)
    sequence, count = pool.new_sequence(len(came)), len(came)

    def computed(positions: Tensor) -> Tensor:  # our output of some rows, over the pool's KV of the others
        h, turns = came[positions], decoder.rope.at(positions + shift, count + shift)
        rows = replace(rows_of(decoder, sequence, positions, count, count), rotations=turns)
        _, k, v = layer.project_qkv(h)
        write_kv(layer, k, v, rows)
        return layer.finish(attend(layer, queries(layer, h, rows), rows), h)[0]

    positions = torch.arange(count, device=decoder.device)
    every = computed(positions)
    _demand(decoder, _is_same(every, theirs, came), f"layer {layer.index} differs from transformers'")
    some = positions[1::3]
    again = computed(some)
    same = _is_same(again, theirs[some], came[some])
    _demand(decoder, same, f"a row of layer {layer.index} depends on the rows beside it")


def _check_recurrent(decoder: GenericDecoder, module: GenericModule, came: Tensor, call: LayerCall, index: int) -> None:
    """Compare a layer without K and V, whose rows come in slices and one by one."""
    theirs, ours = module.whole(came, call), list[Tensor]()
    layer, state = RecurrentLayers(0, [module]), cast(SequenceState, ({},))
    for part in came.split([len(came) // 2, 1, len(came) - len(came) // 2 - 1]):
        states = LaunchStates([len(part)], [state], decode=len(part) == 1)
        ours.append(layer(part, states))
        [state] = states.final()
    same = _is_same(torch.cat(ours), theirs, came)
    _demand(
        decoder, same, f"layer {index}, which is not attention, differs from transformers' if its rows come in slices"
    )


def _check_turns(
    decoder: GenericDecoder, layer: GenericLayer, came: Tensor, call: LayerCall, positions: Tensor
) -> None:
    """Refuse the model unless its RoPE rotates q and k at far positions as ours does."""
    h = came[torch.arange(len(positions), device=came.device) % len(came)]
    plain, turned = layer.module.project(h), layer.module.project(h, call.get("position_embeddings"))
    right = turns_as_ours(decoder.spec, layer.index, plain, turned, positions, SHARE)
    _demand(decoder, right, f"RoPE of layer {layer.index} differs from its config")


def _is_same(ours: Tensor, theirs: Tensor, came: Tensor) -> bool:
    allowed = SHARE * float((theirs - came).abs().max()) + STREAM * float(theirs.abs().max())
    return float((ours - theirs).abs().max()) <= allowed  # False if anything is NaN


def _demand(decoder: GenericDecoder, holds: bool, reason: str) -> None:
    if not holds:
        raise decoder.parts.refused(reason)
