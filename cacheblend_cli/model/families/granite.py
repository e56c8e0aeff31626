"""Granite 3: a Llama with factors on the embedding, the scores, the output of each layer and the logits."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.llama import read as read_llama
from cacheblend_cli.model.families.reader import ConfigFields, Family
from cacheblend_cli.model.spec import ModelSpec

FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def read(fields: ConfigFields) -> ModelSpec:
    embedding, attention, residual, logits = (fields.factor(name, 1.0) for name in FACTORS)
    return replace(
        read_llama(fields),
        embedding_scale=embedding,
        attention_scale=attention,  # in place of head_dim ** -0.5
        residual_scale=residual,
        logit_scale=1 / logits,
    )


GRANITE = Family("granite", ("GraniteForCausalLM", "GraniteModel"), ("attention_bias", "mlp_bias", *FACTORS), read)
