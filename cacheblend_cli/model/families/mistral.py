"""Mistral: a Llama without biases and with one window for all layers; and Ministral, with a window on some of them.

transformers takes a Mistral config with `layer_types` for a Ministral, and so does `families.family_of`.
"""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_of
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {
    "sliding_window": "how many tokens a layer looks back over, itself included; null: all. 4096 where it is missing",
    "max_window_layers": "left over in models that came from a Qwen2: says nothing here",
}
MISSING = {"max_position_embeddings": 131072, "num_key_value_heads": 8}


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISTRAL.architectures[0], MISSING)
    window = fields.optional_integer("sliding_window", 4096)
    return replace(spec, sliding_windows=(window,) * spec.num_layers)


def read_ministral(fields: ConfigFields) -> ModelSpec:
    spec = replace(read(fields), architecture=MINISTRAL.architectures[0])
    types = fields.layer_types(spec.num_layers)
    return spec if types is None else replace(spec, sliding_windows=windows_of(types, spec.sliding_windows[0]))


MISTRAL = Family("mistral", ("MistralForCausalLM", "MistralModel"), FIELDS, read)
MINISTRAL = Family(
    "ministral",
    ("MinistralForCausalLM", "MinistralModel", *MISTRAL.architectures),
    FIELDS | {"layer_types": "which layers have the window; null: all"},
    read_ministral,
)
