"""Gemma 3n: several residual streams (AltUp), a low-rank branch beside attention (LAuReL), inputs by token, and sparse
activations.

The last layers attend to the K and V of an earlier layer, as in Gemma 4's small models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cacheblend_cli.model.families.gemma import AROUND
from cacheblend_cli.model.families.gemma4 import shared_kv_layers, unused_projections
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.families.values import is_number, wrong_value
from cacheblend_cli.model.spec import LayerShapes, ModelSpec, StreamsSpec

FIELDS = (
    "attention_bias", "hidden_activation", "sliding_window", "layer_types", "final_logit_softcapping", "rope_local_base_freq",
    "num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "laurel_rank",
    "altup_num_inputs", "altup_active_idx", "altup_correct_scale", "activation_sparsity_pattern",
    "altup_coef_clip", "altup_lr_multiplier",  # for training
    "query_pre_attn_scalar",  # transformers does not use it: attention's scale is 1
)  # fmt: skip
MISSING: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}  # fmt: skip
SPARSE_LAYERS, SPARSITY = 10, 0.95  # defaults


def read(fields: ConfigFields) -> ModelSpec:
    layers = fields.integer("num_hidden_layers", MISSING["num_hidden_layers"])
    widths = _each(fields, "intermediate_size", MISSING["intermediate_size"], layers)
    if any(not isinstance(width, int) or width < 1 for width in widths):
        raise wrong_value("intermediate_size", fields.values["intermediate_size"], "whole numbers of 1 or more")
    one = ConfigFields(fields.without_rope().values | {"intermediate_size": max(widths)})
    spec = plain_decoder(one, MISSING, activation="hidden_activation")
    spec = replace(spec, sliding_windows=windows_by_pattern(fields, layers, every=5, window=512))
    shapes = LayerShapes(
        kv_heads=(spec.num_kv_heads,) * layers,
        head_dims=(spec.head_dim,) * layers,
        kv_layers=shared_kv_layers(fields, spec, default=15),
        mlp_widths=tuple(widths),
        values_of_keys=(False,) * layers,
    )
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, 1000000.0, 10000.0)
    spec = replace(spec, shapes=shapes, rope=full, local_rope=local, config=fields.values)
    return replace(
        spec,
        norms=AROUND,
        qk_norm=True,
        v_norm=True,
        attention_scale=1.0,
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=fields.optional_factor("final_logit_softcapping", 30.0),
        token_width=fields.integer("hidden_size_per_layer_input", 256),
        token_vocab=fields.integer("vocab_size_per_layer_input", 262144),
        streams=_streams(fields),
        sparsity=_sparsity(fields, layers),
        other_parts=unused_projections(spec),
    )


def _streams(fields: ConfigFields) -> StreamsSpec:
    count, active = fields.integer("altup_num_inputs", 4), fields.integer("altup_active_idx", 0, least=0)
    if active >= count:
        raise wrong_value("altup_active_idx", active, f"less than altup_num_inputs, {count}")
    return StreamsSpec(count, active, fields.flag("altup_correct_scale", True), fields.integer("laurel_rank", 64))


def _sparsity(fields: ConfigFields, layers: int) -> tuple[float, ...]:
    """Return the share of the gate's channels that is cut off, per layer. The default depends on the layer count."""
    if fields.values.get("activation_sparsity_pattern") is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return (SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    found = _each(fields, "activation_sparsity_pattern", None, layers)
    if not all(is_number(share) and 0 <= share < 1 for share in found):
        raise wrong_value("activation_sparsity_pattern", found, "numbers of 0 or more and below 1")
    return tuple(map(float, found))


def _each(fields: ConfigFields, name: str, default: Any, layers: int) -> list[Any]:
    """Return one value per layer from a list or a single value."""
    value = fields.values.get(name, default)
    if not isinstance(value, list):
        return [value] * layers
    if len(value) != layers:
        raise wrong_value(name, value, f"one value, or one for each of the {layers} layers")
    return value


GEMMA3N = Family("gemma3n_text", ("Gemma3nForCausalLM", "Gemma3nTextModel"), FIELDS, read)
