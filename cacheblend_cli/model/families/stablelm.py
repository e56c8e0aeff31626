"""StableLM: LayerNorms with biases, RoPE over a quarter of the head and, if the config says so, parallel attention and
MLP."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

FIELDS = ("layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "hidden_dropout")
MISSING = {
    "max_position_embeddings": 4096, "num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISSING, eps="layer_norm_eps")
    parallel = fields.flag("use_parallel_residual")
    return replace(
        spec,
        norms=spec.norms[:1] if parallel else spec.norms,
        parallel=parallel,
        layer_norm=True,
        norm_bias=True,
        qkv_bias=fields.flag("use_qkv_bias"),
    )


STABLELM = Family("stablelm", ("StableLmForCausalLM", "StableLmModel"), FIELDS, read)
