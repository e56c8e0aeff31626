"""LayerNorms in the place of RMSNorms: StableLM, StarCoder 2, Command R (Cohere) and Command R7B, A (Cohere 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.spec import ModelSpec

STABLELM_FIELDS = ("layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "hidden_dropout")
STARCODER2_FIELDS = ("norm_epsilon", "use_bias", "sliding_window", "residual_dropout", "embedding_dropout")
COHERE_FIELDS = ("layer_norm_eps", "logit_scale", "attention_bias")
COHERE2_FIELDS = (*COHERE_FIELDS, "sliding_window", "layer_types", "sliding_window_pattern")
MISSING_STABLELM = {
    "max_position_embeddings": 4096, "num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
}  # fmt: skip
MISSING_STARCODER2 = {
    "max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
MISSING_COHERE = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
MISSING_COHERE2 = MISSING_COHERE | {"rope_theta": 10000.0}
STARCODER2_NAMES = (("up_proj", "mlp.c_fc"), ("down_proj", "mlp.c_proj"))


def read_stablelm(fields: ConfigFields) -> ModelSpec:
    """Norms with biases, RoPE over a quarter of the head, and where the config says so, attention and MLP side by side."""
    spec = plain_decoder(fields, MISSING_STABLELM, eps="layer_norm_eps")
    parallel = fields.flag("use_parallel_residual")
    return replace(
        spec,
        norms=spec.norms[:1] if parallel else spec.norms,
        parallel=parallel,
        layer_norm=True,
        norm_bias=True,
        qkv_bias=fields.flag("use_qkv_bias"),
    )


def read_starcoder2(fields: ConfigFields) -> ModelSpec:
    """Biases everywhere, an MLP without a gate, and one window for all layers."""
    spec = plain_decoder(fields, MISSING_STARCODER2, eps="norm_epsilon")
    bias, window = fields.flag("use_bias", True), fields.optional_integer("sliding_window", None)
    return replace(
        spec,
        sliding_windows=(window,) * spec.num_layers,
        layer_norm=True,
        norm_bias=True,
        gated_mlp=False,
        renamed=STARCODER2_NAMES,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def read_cohere(fields: ConfigFields, missing: Mapping[str, Any] = MISSING_COHERE) -> ModelSpec:
    """Norms without biases, attention and MLP side by side, RoPE over neighbouring channels, scaled logits."""
    spec = plain_decoder(fields, missing, eps="layer_norm_eps")
    scale = fields.factor("logit_scale", 0.0625)
    return replace(spec, norms=spec.norms[:1], parallel=True, layer_norm=True, interleaved=True, logit_scale=scale)


def read_cohere2(fields: ConfigFields) -> ModelSpec:
    """Three of four layers have a window, and the others no RoPE."""
    spec = read_cohere(fields, MISSING_COHERE2)
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    unrotated = tuple(layer for layer, window in enumerate(windows) if window is None)
    return replace(spec, sliding_windows=windows, unrotated=unrotated)


STABLELM = Family("stablelm", ("StableLmForCausalLM", "StableLmModel"), STABLELM_FIELDS, read_stablelm)
STARCODER2 = Family("starcoder2", ("Starcoder2ForCausalLM", "Starcoder2Model"), STARCODER2_FIELDS, read_starcoder2)
COHERE = Family("cohere", ("CohereForCausalLM", "CohereModel"), COHERE_FIELDS, read_cohere)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM", "Cohere2Model"), COHERE2_FIELDS, read_cohere2)
