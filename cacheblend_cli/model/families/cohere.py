"""Command R (Cohere) and Command R7B, A (Cohere 2): LayerNorms without biases, attention and MLP side by side, RoPE over
neighbouring channels, scaled logits. In Cohere 2 three of four layers have a window, and the others no RoPE."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, every_nth, plain_decoder, windows_of
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {
    "layer_norm_eps": "added under the root of every norm",
    "logit_scale": "a factor on the logits",
    "attention_bias": "biases of the q, k, v and o projections",
}
FIELDS_1 = FIELDS | {"use_qk_norm": "a LayerNorm for each head of q and k: not implemented"}
FIELDS_2 = FIELDS | {
    "sliding_window": "how many tokens a layer with a window looks back over, itself included",
    "layer_types": "which layers have the window; null: by sliding_window_pattern",
    "sliding_window_pattern": "every how many layers one has no window; 4 where it is missing",
}
MISSING = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
MISSING_2 = MISSING | {"rope_theta": 10000.0}


def read(fields: ConfigFields) -> ModelSpec:
    if fields.flag("use_qk_norm"):
        raise UsageError(
            "config.json has use_qk_norm = true: a LayerNorm for each head of q and k is not implemented",
            "use another model",
        )
    return _parallel(plain_decoder(fields, COHERE.architectures[0], MISSING, eps="layer_norm_eps"), fields)


def read_2(fields: ConfigFields) -> ModelSpec:
    spec = _parallel(plain_decoder(fields, COHERE2.architectures[0], MISSING_2, eps="layer_norm_eps"), fields)
    pattern = fields.integer("sliding_window_pattern", 4)
    types = fields.layer_types(spec.num_layers) or every_nth(spec.num_layers, pattern)
    windows = windows_of(types, fields.optional_integer("sliding_window", 4096))
    unrotated = tuple(layer for layer, window in enumerate(windows) if window is None)
    return replace(spec, sliding_windows=windows, unrotated=unrotated)


def _parallel(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    bias, scale = fields.flag("attention_bias"), fields.factor("logit_scale", 0.0625)
    return replace(
        spec, norms=spec.norms[:1], parallel=True, layer_norm=True, interleaved=True, logit_scale=scale, qkv_bias=bias,
        o_bias=bias,
    )  # fmt: skip


COHERE = Family("cohere", ("CohereForCausalLM", "CohereModel"), FIELDS_1, read)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM", "Cohere2Model"), FIELDS_2, read_2)
