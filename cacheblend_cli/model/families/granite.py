"""Granite 3: a Llama with factors on the embedding, on the scores, on what a layer adds and on the logits."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.llama import read as read_llama
from cacheblend_cli.model.families.reader import ConfigFields, Family
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {
    "attention_bias": "biases of the q, k, v and o projections",
    "mlp_bias": "biases of the gate, up and down projections",
    "embedding_multiplier": "a factor on the embedding",
    "attention_multiplier": "a factor on the scores, in place of head_dim ** -0.5; 1 where it is missing",
    "residual_multiplier": "a factor on what attention and MLP add",
    "logits_scaling": "what the logits are divided by",
}


def read(fields: ConfigFields) -> ModelSpec:
    return replace(
        read_llama(fields),
        architecture=GRANITE.architectures[0],
        embedding_scale=fields.factor("embedding_multiplier", 1.0),
        attention_scale=fields.factor("attention_multiplier", 1.0),
        residual_scale=fields.factor("residual_multiplier", 1.0),
        logit_scale=1 / fields.factor("logits_scaling", 1.0),
    )


GRANITE = Family("granite", ("GraniteForCausalLM", "GraniteModel"), FIELDS, read)
