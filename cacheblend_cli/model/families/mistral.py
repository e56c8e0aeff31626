"""Mistral: a Llama without biases and with one window for all layers; Ministral, with a window on some of them; and
Ministral 3, whose queries grow with their positions.

transformers treats a Mistral config with `layer_types` as a Ministral, and so does `families.family_of`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_of
from cacheblend_cli.model.families.values import is_number, wrong_value
from cacheblend_cli.model.spec import QUERY_GROWTH, ModelSpec

FIELDS = ("sliding_window", "max_window_layers")  # max_window_layers is a leftover from Qwen2 without effect here
MISSING = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
MISSING_3 = {
    "max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROPE_3 = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, QUERY_GROWTH: 0.1,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISSING)
    window = fields.optional_integer("sliding_window", 4096)
    return replace(spec, sliding_windows=(window,) * spec.num_layers)


def read_ministral(fields: ConfigFields) -> ModelSpec:
    spec = read(fields)
    types = fields.layer_types(spec.num_layers)
    return spec if types is None else replace(spec, sliding_windows=windows_of(types, spec.sliding_windows[0]))


def read_ministral3(fields: ConfigFields) -> ModelSpec:
    """Read a Ministral 3. The growth of queries is one of RoPE's parameters, in config.json and in the spec."""
    values, written = dict(fields.values), "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = values.get(written) or ROPE_3
    if not isinstance(rope, dict):
        raise wrong_value(written, rope, "an object or null")
    values[written] = {k: v for k, v in rope.items() if k not in (QUERY_GROWTH, "max_position_embeddings")}
    spec = plain_decoder(ConfigFields(values), MISSING_3)
    beta: Any = rope.get(QUERY_GROWTH)
    if not is_number(beta) or beta < 0:
        raise wrong_value(QUERY_GROWTH, beta, "a number of 0 or more")
    if not spec.rope.get("original_max_position_embeddings"):
        raise UsageError(
            f"{written} in config.json lack original_max_position_embeddings, which {QUERY_GROWTH} needs",
            "correct config.json, or fetch the checkpoint again",
        )
    window = fields.optional_integer("sliding_window", None)
    return replace(spec, rope=spec.rope | {QUERY_GROWTH: float(beta)}, sliding_windows=(window,) * spec.num_layers)


MISTRAL = Family("mistral", ("MistralForCausalLM", "MistralModel"), FIELDS, read)
MINISTRAL = Family(
    "ministral",
    ("MinistralForCausalLM", "MinistralModel", *MISTRAL.architectures),
    (*FIELDS, "layer_types"),
    read_ministral,
)
MINISTRAL3 = Family("ministral3", ("Ministral3ForCausalLM", "Ministral3Model"), ("sliding_window",), read_ministral3)
