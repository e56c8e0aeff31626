"""Command R (Cohere) and Command R7B, A (Cohere 2): LayerNorms without biases, parallel attention and MLP, RoPE over
neighbouring channels, scaled logits. In Cohere 2 three of four layers have a window, and the others have no RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.spec import ModelSpec

FIELDS = ("layer_norm_eps", "logit_scale", "attention_bias")
FIELDS_2 = (*FIELDS, "sliding_window", "layer_types", "sliding_window_pattern")
MISSING = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
MISSING_2 = MISSING | {"rope_theta": 10000.0}


def read(fields: ConfigFields, missing: Mapping[str, Any] = MISSING) -> ModelSpec:
    spec = plain_decoder(fields, missing, eps="layer_norm_eps")
    scale = fields.factor("logit_scale", 0.0625)
    return replace(spec, norms=spec.norms[:1], parallel=True, layer_norm=True, interleaved=True, logit_scale=scale)


def read_2(fields: ConfigFields) -> ModelSpec:
    spec = read(fields, MISSING_2)
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    unrotated = tuple(layer for layer, window in enumerate(windows) if window is None)
    return replace(spec, sliding_windows=windows, unrotated=unrotated)


COHERE = Family("cohere", ("CohereForCausalLM", "CohereModel"), FIELDS, read)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM", "Cohere2Model"), FIELDS_2, read_2)
