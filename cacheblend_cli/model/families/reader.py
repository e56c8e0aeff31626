"""Base of the families: typed access to the fields of config.json, and the plain decoder that every family varies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.rope_fields import rope_parameters
from cacheblend_cli.model.families.values import LARGEST, LARGEST_INTEGER, is_number, wrong_value
from cacheblend_cli.model.spec import ModelSpec

# Names in config.json -> names in the kernels.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
LAYER_TYPES = {
    "full_attention": "full_attention",
    "attention": "full_attention",
    "sliding_attention": "sliding_attention",
}

# Fields of every family that shape its forward pass. partial_rotary_factor: only families that rotate a part of a head
# accept values other than 1.
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "rope_parameters",
    "rope_scaling", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
# Fields of transformers' config classes that do not touch the forward pass.
OTHER_FIELDS = (
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype",  # identify the model and the file
    "initializer_range", "attention_dropout", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward",  # how transformers slices the MLP: the result is the same
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model_type of transformers."""

    model_type: str
    architectures: tuple[str, ...]  # classes a config may name, the language model's first
    # its config's fields besides SHAPE_FIELDS and OTHER_FIELDS: all are implemented or do not affect the forward pass
    fields: Collection[str]
    read: Callable[[ConfigFields], ModelSpec]  # returns the spec without `architecture` and `config`
    missing: Mapping[str, Any] = field(default_factory=dict)  # defaults of transformers' config class

    def knows(self, name: str) -> bool:
        return name in self.fields or name in SHAPE_FIELDS or name in OTHER_FIELDS

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        """Return the spec of a config. Raises UsageError naming the field."""
        fields = ConfigFields(config, self.missing)
        return replace(self.read(fields), architecture=self.architectures[0], config=config)


class ConfigFields:
    """Typed fields of a config.json. A missing field has the family's default, else the one given here; null is not
    missing. Raises UsageError naming the field."""

    def __init__(self, values: Mapping[str, Any], missing: Mapping[str, Any]) -> None:
        self.values, self.missing = values, missing

    def changed(self, **values: Any) -> ConfigFields:
        return ConfigFields({**self.values, **values}, self.missing)

    def without_rope(self) -> ConfigFields:
        """Return the fields without RoPE's, for families that give RoPE by kind of layer, see `rope_by_kind`."""
        return self.changed(rope_parameters=None, rope_scaling=None)

    def value(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, self.missing.get(name, default))

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of `least` or more, up to its limit in LARGEST. Without any default the field is
        required."""
        value = self.value(name, default)
        if value is None and name not in self.values:
            raise UsageError(f"config.json lacks {name!r}", "fetch the checkpoint again")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong_value(name, value, f"a whole number of {least} or more")
        if value > (most := LARGEST.get(name, LARGEST_INTEGER)):
            raise wrong_value(name, value, f"{most} or less")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number of 1 or more, or None for null."""
        return None if self.value(name, default) is None else self.integer(name, default)

    def factor(self, name: str, default: float) -> float:
        """Return a finite number above 0."""
        value = self.value(name, default)
        if not is_number(value) or value <= 0:
            raise wrong_value(name, value, "a number above 0")
        return float(value)

    def optional_factor(self, name: str, default: float | None = None) -> float | None:
        """Return a finite number above 0, or None for null."""
        value = self.value(name, default)
        return None if value is None else self.factor(name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false; null is false."""
        value = self.value(name, default)
        if not isinstance(value, bool | None):
            raise wrong_value(name, value, "true or false")
        return bool(value)

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return `full_attention` or `sliding_attention` per layer; None if config.json has no layer_types."""
        types = self.values.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list):
            raise wrong_value("layer_types", types, "a list of names")
        odd = sorted({str(kind) for kind in types} - set(LAYER_TYPES))
        if odd or len(types) != num_layers:
            raise UsageError(
                f"layer_types in config.json: {odd or len(types)}",
                f"known: full_attention, sliding_attention, one for each of the {num_layers} layers",
            )
        return [LAYER_TYPES[kind] for kind in types]


def plain_decoder(fields: ConfigFields, eps: str = "rms_norm_eps", activation: str = "hidden_act") -> ModelSpec:
    """Return the decoder with full attention and without a norm on heads, from config.json.

    eps, activation: the fields' names. A family whose defaults have partial_rotary_factor can rotate a part of the
    head. attention_bias and mlp_bias apply to all projections; families without these fields refuse them before.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UsageError(f"{heads} attention heads do not divide into {kv_heads} KV heads", "check config.json")
    head_dim = fields.optional_integer("head_dim") or hidden // heads
    if head_dim % 2:
        raise wrong_value("head_dim", head_dim, "even: RoPE rotates pairs")
    act = fields.value(activation, "silu")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise UsageError(f"unknown activation {act!r} ({activation})", f"known: {', '.join(ACTIVATIONS)}")
    max_positions, attention_bias = fields.integer("max_position_embeddings"), fields.flag("attention_bias")
    return ModelSpec(
        architecture="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        activation=ACTIVATIONS[act],
        rms_norm_eps=fields.factor(eps, 1e-6),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=False,
        tied=fields.flag("tie_word_embeddings"),
        max_position_embeddings=max_positions,
        sliding_windows=(None,) * layers,
        rope=rope_parameters(fields.values, max_positions, head_dim, fields.missing),
        config={},
    )


def windows_by_pattern(fields: ConfigFields, num_layers: int, every: int, window: int = 4096) -> tuple[int | None, ...]:
    """Return the window of each layer: from layer_types; without it, all layers except every n-th have one, with n =
    sliding_window_pattern. every, window: defaults of sliding_window_pattern and sliding_window."""
    types = fields.layer_types(num_layers)
    if types is None:
        pattern = fields.integer("sliding_window_pattern", every)
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    return windows_of(types, fields.optional_integer("sliding_window", window))


def windows_of(types: list[str], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer: `window` if its type is sliding_attention, else None."""
    if window is None and "sliding_attention" in types:
        raise UsageError(
            "layer_types in config.json has sliding_attention, but sliding_window is missing", "check config.json"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
