"""Gemma 1 to 4 and 3n: the embedding scaled by sqrt(hidden_size); before 3n, norms that multiply by 1 + weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.moe import checked
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.families.rope_fields import KINDS, rope_by_kind, rope_parameters
from cacheblend_cli.model.families.values import is_number, wrong_value
from cacheblend_cli.model.spec import ExpertsSpec, LayerShapes, ModelSpec, StreamsSpec

AROUND = (
    ("attention_in", "input_layernorm"),
    ("attention_out", "post_attention_layernorm"),
    ("mlp_in", "pre_feedforward_layernorm"),
    ("mlp_out", "post_feedforward_layernorm"),
)
AROUND_EXPERTS = (
    *AROUND,
    ("dense_out", "post_feedforward_layernorm_1"),
    ("experts_in", "pre_feedforward_layernorm_2"),
    ("experts_out", "post_feedforward_layernorm_2"),
)
GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SPARSE_LAYERS, SPARSITY = 10, 0.95  # defaults
# tensors of layers that use another layer's K and V, if the checkpoint has them
UNUSED = ("k_proj", "v_proj", "k_norm")


def read(fields: ConfigFields) -> ModelSpec:
    if fields.values.get("hidden_act") == "gelu":  # the first releases say gelu but mean gelu_pytorch_tanh
        fields = fields.changed(hidden_act="gelu_pytorch_tanh")
    return _scaled(plain_decoder(fields))


def read_2(fields: ConfigFields) -> ModelSpec:
    """Gemma 2: norms around attention and MLP, windows on every other layer, and soft caps."""
    spec, cap = _around(fields, every=2), fields.optional_factor("attn_logit_softcapping", 50.0)
    return replace(spec, attention_soft_cap=cap, logit_soft_cap=fields.optional_factor("final_logit_softcapping", 30.0))


def read_3(fields: ConfigFields) -> ModelSpec:
    """Gemma 3: windows on five of six layers, with a separate RoPE, and a norm on each head of q and k."""
    spec = _with_ropes(_around(fields.without_rope(), every=6), fields)
    return replace(spec, logit_soft_cap=fields.optional_factor("final_logit_softcapping"), qk_norm=True)


def _scaled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_scale=spec.hidden_size**0.5, norm_offset=1.0)


def _around(fields: ConfigFields, every: int) -> ModelSpec:
    spec = _scaled(plain_decoder(fields, activation="hidden_activation"))
    windows = windows_by_pattern(fields, spec.num_layers, every)
    scale = fields.integer("query_pre_attn_scalar", 256) ** -0.5
    return replace(spec, norms=AROUND, sliding_windows=windows, attention_scale=scale)


def _with_ropes(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, 1000000.0, 10000.0)
    return replace(spec, rope=full, local_rope=local)


def read_3n(fields: ConfigFields) -> ModelSpec:
    """Gemma 3n: several residual streams (AltUp), a low-rank branch beside attention (LAuReL), inputs by token, and
    sparse activations. The last layers attend to the K and V of an earlier layer, as in Gemma 4's small models."""
    layers = fields.integer("num_hidden_layers")
    widths = _each(fields, "intermediate_size", layers)
    if any(not isinstance(width, int) or width < 1 for width in widths):
        raise wrong_value("intermediate_size", fields.values["intermediate_size"], "whole numbers of 1 or more")
    one = fields.without_rope().changed(intermediate_size=max(widths))
    spec = plain_decoder(one, activation="hidden_activation")
    spec = replace(spec, sliding_windows=windows_by_pattern(fields, layers, every=5, window=512))
    heads, dims = (spec.num_kv_heads,) * layers, (spec.head_dim,) * layers
    shapes = LayerShapes(heads, dims, _shared_kv_layers(fields, spec), tuple(widths), values_of_keys=(False,) * layers)
    spec = _normed_values(replace(_with_ropes(spec, fields), shapes=shapes), fields)
    width, vocabulary = _token_inputs(fields, least=1)
    spec = replace(spec, token_width=width, token_vocab=vocabulary)
    return replace(spec, streams=_streams(fields), sparsity=_sparsity(fields, layers))


def _token_inputs(fields: ConfigFields, least: int) -> tuple[int, int]:
    width = fields.integer("hidden_size_per_layer_input", 256, least=least)
    return width, fields.integer("vocab_size_per_layer_input", 262144)


def _normed_values(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    """Return the spec with the common features of Gemma 3n and 4. `spec.shapes` must be set."""
    return replace(
        spec,
        norms=AROUND,
        qk_norm=True,
        v_norm=True,
        attention_scale=1.0,
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=fields.optional_factor("final_logit_softcapping"),
        other_parts=_unused_projections(spec),
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
    found = _each(fields, "activation_sparsity_pattern", layers)
    if not all(is_number(share) and 0 <= share < 1 for share in found):
        raise wrong_value("activation_sparsity_pattern", found, "numbers of 0 or more and below 1")
    return tuple(map(float, found))


def _each(fields: ConfigFields, name: str, layers: int) -> list[Any]:
    """Return one value per layer from a list or a single value."""
    value = fields.value(name)
    if not isinstance(value, list):
        return [value] * layers
    if len(value) != layers:
        raise wrong_value(name, value, f"one value, or one for each of the {layers} layers")
    return value


def _shared_kv_layers(fields: ConfigFields, spec: ModelSpec) -> tuple[int, ...]:
    """Return for each layer the layer whose K and V it attends to. The last `num_kv_shared_layers` layers use the last
    layer before them with the same kind of attention."""
    full = [window is None for window in spec.sliding_windows]
    shared = fields.integer("num_kv_shared_layers", 0, least=0)
    own = spec.num_layers - shared
    if shared and (own < 1 or set(full[:own]) != set(full)):
        raise wrong_value(
            "num_kv_shared_layers", shared, "less: a layer of each kind of attention has K and V of its own"
        )
    sources = [max(i for i in range(own) if full[i] == full[layer]) for layer in range(own, spec.num_layers)]
    return (*range(own), *sources)


def _unused_projections(spec: ModelSpec) -> tuple[str, ...]:
    """Return the prefixes of unused tensors: projections of layers that use another layer's K and V."""
    return tuple(
        f"{base}layers.{layer}.self_attn.{part}."
        for base in ("", "model.", "model.language_model.", "language_model.model.")
        for layer in range(spec.num_layers)
        if spec.kv_layer(layer) != layer
        for part in UNUSED
    )


def read_4(fields: ConfigFields) -> ModelSpec:
    """Gemma 4: layers with full attention have their own head size and number of KV heads, and V is normed.

    In the small models (E2B, E4B) the last layers attend to the K and V of an earlier layer and have an MLP twice as
    wide, and every layer gets an input by token. In the large model, V of full attention is made from K's projection.
    26B-A4B has experts beside each layer's MLP.
    """
    width, vocabulary = _token_inputs(fields, least=0)
    spec = replace(read_4_unified(fields), token_width=width, token_vocab=vocabulary)
    if not fields.flag("enable_moe_block"):
        return spec
    count, per_token = fields.integer("num_experts"), fields.integer("top_k_experts")
    experts = ExpertsSpec(count, per_token, fields.integer("moe_intermediate_size"), tuple(range(spec.num_layers)))
    experts = replace(experts, base="", router="router.proj", beside=True)
    return replace(spec, norms=AROUND_EXPERTS, experts=checked(experts, "top_k_experts"))


def read_4_unified(fields: ConfigFields) -> ModelSpec:
    """gemma4_unified_text (12B): Gemma 4 without inputs by token and without experts."""
    both = fields.values.get("use_bidirectional_attention")
    if both not in (None, "vision"):  # "vision": bidirectional for images only, which are not read
        raise wrong_value("use_bidirectional_attention", both, 'null or "vision": text has to be causal')
    spec = plain_decoder(fields.without_rope(), activation="hidden_activation")
    windows = windows_by_pattern(fields, spec.num_layers, every=6)
    # transformers gives the last layer no window, whatever the config says
    spec = replace(spec, sliding_windows=(*windows[:-1], None))
    spec = replace(spec, shapes=_shapes(fields, spec))
    return replace(_normed_values(replace(spec, **_ropes(fields, spec)), fields), layer_scale=True)


def _shapes(fields: ConfigFields, spec: ModelSpec) -> LayerShapes:
    full = [window is None for window in spec.sliding_windows]
    heads, dims = zip(*(_heads(fields, spec, layer, is_full) for layer, is_full in enumerate(full)), strict=True)
    kv_layers = _shared_kv_layers(fields, spec)
    wide = 2 if fields.flag("use_double_wide_mlp") else 1
    widths = (
        spec.intermediate_size if source == i else wide * spec.intermediate_size for i, source in enumerate(kv_layers)
    )
    same = fields.flag("attention_k_eq_v")
    return LayerShapes(heads, dims, kv_layers, tuple(widths), tuple(same and is_full for is_full in full))


def _heads(fields: ConfigFields, spec: ModelSpec, layer: int, full: bool) -> tuple[int, int]:
    """Return (KV heads, head_dim) of a layer, from per_layer_config as transformers 5 writes it (names such as "05"),
    or from the fields of older files."""
    given = fields.values.get("per_layer_config")
    if not isinstance(given, dict | None) or len(given or {}) > spec.num_layers:
        raise wrong_value("per_layer_config", given, "null, or an object with an entry for a layer")
    if given is not None:
        own = next((of for name, of in given.items() if str(name).lstrip("0") == str(layer).lstrip("0")), None) or {}
        if not isinstance(own, dict) or not set(own) <= {"head_dim", "num_key_value_heads"}:
            raise wrong_value("per_layer_config", own, "head_dim and num_key_value_heads of a layer")
    else:
        own = {"head_dim": fields.integer("global_head_dim", 512)} if full else {}
        if full and fields.flag("attention_k_eq_v"):
            own["num_key_value_heads"] = fields.optional_integer("num_global_key_value_heads") or spec.num_kv_heads
    of_layer = ConfigFields(own, {})
    heads, dim = of_layer.integer("num_key_value_heads", spec.num_kv_heads), of_layer.integer("head_dim", spec.head_dim)
    if spec.num_heads % heads or dim % 2:
        raise UsageError(
            f"layer {layer} has {heads} KV heads of {dim}, and {spec.num_heads} attention heads",
            "check num_global_key_value_heads, global_head_dim and per_layer_config in config.json",
        )
    return heads, dim


def _ropes(fields: ConfigFields, spec: ModelSpec) -> dict[str, Any]:
    given = fields.values.get("rope_parameters") or GEMMA4_ROPES
    if not isinstance(given, dict) or not set(given) <= set(KINDS):
        raise wrong_value("rope_parameters", given, f"given by kind of layer: {', '.join(KINDS)}")
    found = {}
    for kind, name in zip(KINDS, ("rope", "local_rope"), strict=True):
        layers = [i for i, window in enumerate(spec.sliding_windows) if (window is None) == (kind == KINDS[0])]
        dims = {spec.heads_of(layer)[1] for layer in layers} or {spec.head_dim}
        if len(dims) > 1:
            raise UsageError(f"layers of {kind} have heads of {sorted(dims)}", "check per_layer_config in config.json")
        own = {"rope_parameters": given.get(kind) or GEMMA4_ROPES[kind]}
        found[name] = rope_parameters(own, spec.max_position_embeddings, dims.pop())
    return found


_WINDOWS = (
    "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping",
)  # fmt: skip
_UNIFIED = (
    "attention_bias", "hidden_activation", "sliding_window", "layer_types", "final_logit_softcapping", "attention_k_eq_v",
    "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "use_double_wide_mlp", "per_layer_config",
    "use_bidirectional_attention", "vocab_size_per_layer_input",  # published unified files have the last, but nothing uses it
)  # fmt: skip
_GEMMA1 = {
    "max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3 = _GEMMA1 | {
    "num_key_value_heads": 4, "max_position_embeddings": 131072, "vocab_size": 262208, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
}  # fmt: skip
_GEMMA3N = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "num_kv_shared_layers": 15, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA4 = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "sliding_window": 512,
}  # fmt: skip
FAMILIES = (
    Family("gemma", ("GemmaForCausalLM", "GemmaModel"), ("attention_bias",), read, _GEMMA1),
    Family("gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), (*_WINDOWS, "attn_logit_softcapping"), read_2,
           _GEMMA1 | {"num_key_value_heads": 4}),
    Family("gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel"),
           (*_WINDOWS, "sliding_window_pattern", "rope_local_base_freq"), read_3, _GEMMA3),
    # 3n's query_pre_attn_scalar is not used by transformers: attention's scale is 1
    Family("gemma3n_text", ("Gemma3nForCausalLM", "Gemma3nTextModel"),
           (*_WINDOWS, "rope_local_base_freq", "num_kv_shared_layers", "hidden_size_per_layer_input",
            "vocab_size_per_layer_input", "laurel_rank", "altup_num_inputs", "altup_active_idx", "altup_correct_scale",
            "activation_sparsity_pattern", "altup_coef_clip", "altup_lr_multiplier"),  # the last two are for training
           read_3n, _GEMMA3N),
    Family("gemma4_text", ("Gemma4ForCausalLM", "Gemma4TextModel"),
           (*_UNIFIED, "hidden_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
           read_4, _GEMMA4),
    Family("gemma4_unified_text", ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"), _UNIFIED, read_4_unified,
           _GEMMA4 | {"max_position_embeddings": 262144, "sliding_window": 1024}),
)  # fmt: skip
