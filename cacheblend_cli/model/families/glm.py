"""GLM-4: RoPE rotates neighbouring channels of the first half of a head; since 0414 (glm4) norms around attention and
MLP."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

AROUND = (
    ("attention_in", "input_layernorm"),
    ("attention_out", "post_self_attn_layernorm"),
    ("mlp_in", "post_attention_layernorm"),
    ("mlp_out", "post_mlp_layernorm"),
)
MISSING = {
    "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 0.00000015625,
    "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISSING)
    # attention_bias applies to q, k and v only
    return replace(spec, interleaved=True, fused=("gate_up_proj",), o_bias=False)


def read_4(fields: ConfigFields) -> ModelSpec:
    return replace(read(fields), norms=AROUND)


GLM = Family("glm", ("GlmForCausalLM", "GlmModel"), ("attention_bias",), read)
GLM4 = Family("glm4", ("Glm4ForCausalLM", "Glm4Model"), ("attention_bias",), read_4)
