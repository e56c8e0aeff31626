"""StarCoder 2: LayerNorms with biases, biases everywhere, an MLP without a gate, and one window for all layers."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

FIELDS = ("norm_epsilon", "use_bias", "sliding_window", "residual_dropout", "embedding_dropout")
MISSING = {
    "max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
NAMES = (("up_proj", "mlp.c_fc"), ("down_proj", "mlp.c_proj"))


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISSING, eps="norm_epsilon")
    bias, window = fields.flag("use_bias", True), fields.optional_integer("sliding_window", None)
    return replace(
        spec,
        sliding_windows=(window,) * spec.num_layers,
        layer_norm=True,
        norm_bias=True,
        gated_mlp=False,
        renamed=NAMES,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


STARCODER2 = Family("starcoder2", ("Starcoder2ForCausalLM", "Starcoder2Model"), FIELDS, read)
