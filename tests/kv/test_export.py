"""Exported KV is what transformers' own cache holds after the same prompt, for each layout of heads and windows."""

from __future__ import annotations

from pathlib import Path

import hub_families
import hub_generic
import hub_models
import pytest
import torch
from hub_models import HubModel, load_reference
from transformers import DynamicCache

from cacheblend_cli.kv.export import export
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.model.loading import load_model

NUM_TOKENS = 40
NAMES = [
    "qwen3",
    "phi-4-mini",
    "glm-4-9b",
    "command-r7b",
    "gemma-3-4b",
    "stablelm-3b",
    "gpt-oss-20b",
    "olmo-3, yarn",
    "seed-oss",
]
MODELS = [m for m in (*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN) if m.name in NAMES]


def prefilled(model: HubModel, path: Path, scale: float | None = None) -> tuple[Decoder, KVPool, torch.Tensor]:
    """A pool whose first sequence holds NUM_TOKENS tokens. scale: of a float8 pool."""
    model.write(path)
    decoder = load_model(path, "m", torch.device("cpu"), Precision("float32"), "torch").decoder
    if scale is not None:
        each = (torch.full((decoder.spec.num_kv_heads,), scale),) * decoder.spec.num_layers
        decoder.kv_scales = KVScales(each, each)
    return decoder, KVPool.of(decoder, 6, 16), torch.arange(NUM_TOKENS) * 7 % 300 + 5


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@torch.inference_mode()
def test_exported_kv_equals_transformers_cache(model: HubModel, tmp_path: Path) -> None:
    decoder, pool, ids = prefilled(model, tmp_path)
    sequence, _ = pool.new_sequence(16), pool.new_sequence(16)
    sequence.ensure(NUM_TOKENS)
    assert sequence.contiguous_slot < 0, "or scattered blocks would not be read"
    forward(decoder, rows_of(decoder, sequence, torch.arange(NUM_TOKENS), NUM_TOKENS, NUM_TOKENS), ids)
    reference = load_reference(tmp_path)
    cache = DynamicCache(config=reference.config)
    reference(ids[None], past_key_values=cache)
    kv = export(decoder, sequence, NUM_TOKENS)
    for layer, theirs in zip(kv, cache.layers, strict=True):
        assert layer.start == 0
        assert layer.window == getattr(theirs, "sliding_window", None)
        assert layer.k.shape == (NUM_TOKENS, decoder.spec.num_kv_heads, decoder.spec.head_dim)
        for ours, held in ((layer.k, theirs.keys), (layer.v, theirs.values)):
            held = held[0].transpose(0, 1).float()
            torch.testing.assert_close(ours[-len(held) :], held, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_a_float8_pool_is_dequantised_and_blocks_that_were_given_back_are_left_out(tmp_path: Path) -> None:
    model = next(m for m in hub_models.RUN if m.name == "mistral, narrow window")
    decoder, pool, ids = prefilled(model, tmp_path, scale=0.03)
    sequence = pool.new_sequence(NUM_TOKENS)
    forward(decoder, rows_of(decoder, sequence, torch.arange(NUM_TOKENS), NUM_TOKENS, NUM_TOKENS), ids)
    whole = export(decoder, sequence, NUM_TOKENS).layer(0)
    plain = KVPool(decoder.spec, 6, 16, torch.float32, decoder.device)
    other = plain.new_sequence(NUM_TOKENS)
    forward(decoder, rows_of(decoder, other, torch.arange(NUM_TOKENS), NUM_TOKENS, NUM_TOKENS), ids)
    exact = export(decoder, other, NUM_TOKENS).layer(0)
    assert whole.k.dtype == torch.float32
    torch.testing.assert_close(whole.k, exact.k, rtol=0.07, atol=0.01)  # e4m3 keeps three bits of a mantissa
    sequence.give_back(1)
    rest = export(decoder, sequence, NUM_TOKENS).layer(0)
    assert rest.start == 16
    assert torch.equal(rest.v, whole.v[16:])
