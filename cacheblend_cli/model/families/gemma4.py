"""Gemma 4: like Gemma 3, but layers with full attention have their own head size and number of KV heads, and V is
normed.

In the small models (E2B, E4B) the last layers attend to the K and V of an earlier layer and have an MLP twice as wide,
and every layer gets an input by token. In the large model, V of full attention is made from K's projection. 26B-A4B has
experts beside each layer's MLP. gemma4_unified_text (12B) is the same decoder without inputs by token and without
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.gemma import AROUND
from cacheblend_cli.model.families.moe import checked
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.families.rope_fields import KINDS, rope_parameters
from cacheblend_cli.model.families.values import wrong_value
from cacheblend_cli.model.spec import ExpertsSpec, LayerShapes, ModelSpec

FIELDS = (
    "attention_bias", "hidden_activation", "sliding_window", "layer_types", "final_logit_softcapping", "attention_k_eq_v",
    "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input",
    "vocab_size_per_layer_input", "per_layer_config", "use_bidirectional_attention",
    "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size",
)  # fmt: skip
UNIFIED_FIELDS = tuple(  # published files have vocab_size_per_layer_input, but nothing uses it
    name for name in FIELDS if name != "hidden_size_per_layer_input" and "experts" not in name and "moe" not in name
)
MISSING = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
AROUND_EXPERTS = (
    *AROUND,
    ("dense_out", "post_feedforward_layernorm_1"),
    ("experts_in", "pre_feedforward_layernorm_2"),
    ("experts_out", "post_feedforward_layernorm_2"),
)
# tensors of layers that use another layer's K and V, if the checkpoint has them
UNUSED = ("k_proj", "v_proj", "k_norm")


def read(fields: ConfigFields) -> ModelSpec:
    spec = _decoder(fields, MISSING, window=512)
    spec = replace(
        spec,
        token_width=fields.integer("hidden_size_per_layer_input", 256, least=0),
        token_vocab=fields.integer("vocab_size_per_layer_input", 262144),
    )
    if not fields.flag("enable_moe_block"):
        return spec
    experts = ExpertsSpec(
        count=fields.integer("num_experts"),
        per_token=fields.integer("top_k_experts"),
        width=fields.integer("moe_intermediate_size"),
        layers=tuple(range(spec.num_layers)),
        base="",
        router="router.proj",
        beside=True,
    )
    return replace(spec, norms=AROUND_EXPERTS, experts=checked(experts, "top_k_experts"))


def read_unified(fields: ConfigFields) -> ModelSpec:
    return _decoder(fields, MISSING | {"max_position_embeddings": 262144}, window=1024)


def _decoder(fields: ConfigFields, missing: Mapping[str, Any], window: int) -> ModelSpec:
    both = fields.values.get("use_bidirectional_attention")
    if both not in (None, "vision"):  # "vision": bidirectional for images only, which are not read
        raise wrong_value("use_bidirectional_attention", both, 'null or "vision": text has to be causal')
    spec = plain_decoder(fields.without_rope(), missing, activation="hidden_activation")
    windows = windows_by_pattern(fields, spec.num_layers, every=6, window=window)
    spec = replace(
        spec, sliding_windows=(*windows[:-1], None)
    )  # transformers gives the last layer no window, whatever the config says
    spec = replace(spec, shapes=_shapes(fields, spec))
    spec = replace(spec, **_ropes(fields, spec))
    return replace(
        spec,
        norms=AROUND,
        qk_norm=True,
        v_norm=True,
        layer_scale=True,
        attention_scale=1.0,
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=fields.optional_factor("final_logit_softcapping", None),
        other_parts=unused_projections(spec),
    )


def unused_projections(spec: ModelSpec) -> tuple[str, ...]:
    """Return the prefixes of unused tensors: projections of layers that use another layer's K and V."""
    return tuple(
        f"{base}layers.{layer}.self_attn.{part}."
        for base in ("", "model.", "model.language_model.", "language_model.model.")
        for layer in range(spec.num_layers)
        if spec.kv_layer(layer) != layer
        for part in UNUSED
    )


def _shapes(fields: ConfigFields, spec: ModelSpec) -> LayerShapes:
    full = [window is None for window in spec.sliding_windows]
    heads = [_heads(fields, spec, layer, is_full) for layer, is_full in enumerate(full)]
    kv_layers = shared_kv_layers(fields, spec, default=0)
    wide = 2 if fields.flag("use_double_wide_mlp") else 1
    widths = (
        spec.intermediate_size if source == i else wide * spec.intermediate_size for i, source in enumerate(kv_layers)
    )
    same = fields.flag("attention_k_eq_v")
    return LayerShapes(
        kv_heads=tuple(number for number, _ in heads),
        head_dims=tuple(dim for _, dim in heads),
        kv_layers=kv_layers,
        mlp_widths=tuple(widths),
        values_of_keys=tuple(same and is_full for is_full in full),
    )


def shared_kv_layers(fields: ConfigFields, spec: ModelSpec, default: int) -> tuple[int, ...]:
    """Return for each layer the layer whose K and V it attends to. The last `num_kv_shared_layers` layers use the last
    layer before them with the same kind of attention. default: num_kv_shared_layers if the config lacks it."""
    full = [window is None for window in spec.sliding_windows]
    shared = fields.integer("num_kv_shared_layers", default, least=0)
    own = spec.num_layers - shared
    if shared and (own < 1 or set(full[:own]) != set(full)):
        raise wrong_value(
            "num_kv_shared_layers", shared, "less: a layer of each kind of attention has K and V of its own"
        )
    sources = [max(i for i in range(own) if full[i] == full[layer]) for layer in range(own, spec.num_layers)]
    return (*range(own), *sources)


def _heads(fields: ConfigFields, spec: ModelSpec, layer: int, full: bool) -> tuple[int, int]:
    """Return (KV heads, head_dim) of a layer, from per_layer_config as transformers 5 writes it (names such as "05"),
    or from the fields of older files."""
    given = fields.values.get("per_layer_config")
    if not isinstance(given, dict | None):
        raise wrong_value("per_layer_config", given, "an object or null")
    if given is not None:
        own = next((of for name, of in given.items() if str(name).lstrip("0") == str(layer).lstrip("0")), None) or {}
        if not isinstance(own, dict) or not set(own) <= {"head_dim", "num_key_value_heads"}:
            raise wrong_value("per_layer_config", own, "head_dim and num_key_value_heads of a layer")
    else:
        own = {"head_dim": fields.integer("global_head_dim", 512)} if full else {}
        if full and fields.flag("attention_k_eq_v"):
            own["num_key_value_heads"] = (
                fields.optional_integer("num_global_key_value_heads", None) or spec.num_kv_heads
            )
    of_layer = ConfigFields(own)
    heads, dim = of_layer.integer("num_key_value_heads", spec.num_kv_heads), of_layer.integer("head_dim", spec.head_dim)
    if spec.num_heads % heads or dim % 2:
        raise UsageError(
            f"layer {layer} has {heads} KV heads of {dim}, and {spec.num_heads} attention heads",
            "check num_global_key_value_heads, global_head_dim and per_layer_config in config.json",
        )
    return heads, dim


def _ropes(fields: ConfigFields, spec: ModelSpec) -> dict[str, Any]:
    given = fields.values.get("rope_parameters") or ROPES
    if not isinstance(given, dict) or not set(given) <= set(KINDS):
        raise wrong_value("rope_parameters", given, f"given by kind of layer: {', '.join(KINDS)}")
    found = {}
    for kind, name in zip(KINDS, ("rope", "local_rope"), strict=True):
        layers = [i for i, window in enumerate(spec.sliding_windows) if (window is None) == (kind == KINDS[0])]
        dims = {spec.heads_of(layer)[1] for layer in layers} or {spec.head_dim}
        if len(dims) > 1:
            raise UsageError(f"layers of {kind} have heads of {sorted(dims)}", "check per_layer_config in config.json")
        own = {"rope_parameters": given.get(kind) or ROPES[kind]}
        found[name] = rope_parameters(own, spec.max_position_embeddings, dims.pop())
    return found


GEMMA4 = Family("gemma4_text", ("Gemma4ForCausalLM", "Gemma4TextModel"), FIELDS, read)
GEMMA4_UNIFIED = Family(
    "gemma4_unified_text", ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"), UNIFIED_FIELDS, read_unified
)
