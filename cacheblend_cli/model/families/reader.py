"""What families share: typed access to the fields of config.json, and the decoder that all of them vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.rope_fields import rope_parameters
from cacheblend_cli.model.families.values import is_number, wrong_value
from cacheblend_cli.model.spec import ModelSpec

# As config.json names them -> as the kernels do.
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

# Fields of every family that shape its forward pass.
SHAPE_FIELDS = {
    "vocab_size": "rows of the embedding",
    "hidden_size": "width of the residual stream",
    "intermediate_size": "width inside the MLP",
    "num_hidden_layers": "layers",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "K and V heads; null: as many as query heads",
    "head_dim": "width of a head; null: hidden_size / num_attention_heads",
    "hidden_act": "the MLP's activation",
    "rms_norm_eps": "added under the root of every norm",
    "tie_word_embeddings": "the output head is the embedding",
    "max_position_embeddings": "the context, before RoPE's scaling",
    "rope_parameters": "RoPE as transformers 5 writes it",
    "rope_scaling": "RoPE's scaling as transformers 4 wrote it",
    "rope_theta": "RoPE's base, beside rope_scaling",
    "original_max_position_embeddings": "the context before the scaling of yarn, longrope and llama3",
    "partial_rotary_factor": "the share of a head that RoPE rotates, in families that can; in others only all of it",
}
# Fields of transformers' config classes that do not touch the forward pass.
OTHER_FIELDS = {
    "architectures": "the class; it has to agree with model_type",
    "model_type": "the family",
    "transformers_version": "who wrote the file",
    "dtype": "what the weights are stored in",
    "torch_dtype": "the same, as transformers 4 wrote it",
    "initializer_range": "training",
    "attention_dropout": "training",
    "use_cache": "generation",
    "bos_token_id": "generation",
    "eos_token_id": "generation",
    "pad_token_id": "generation",
    "output_hidden_states": "what transformers returns",
    "output_attentions": "what transformers returns",
    "return_dict": "what transformers returns",
    "chunk_size_feed_forward": "how transformers cuts the MLP up: the result is the same",
    "id2label": "classifiers",
    "label2id": "classifiers",
    "problem_type": "classifiers",
}


@dataclass(frozen=True)
class Family:
    """One model_type of transformers. architectures: the classes a config may name, the language model's first.

    fields: those of its config beside SHAPE_FIELDS and OTHER_FIELDS, and what each is: all of them are either implemented
    or do not touch the forward pass. read: the spec of such a config."""

    model_type: str
    architectures: tuple[str, ...]
    fields: Mapping[str, str]
    read: Callable[[ConfigFields], ModelSpec]

    def knows(self, field: str) -> bool:
        return field in self.fields or field in SHAPE_FIELDS or field in OTHER_FIELDS


class ConfigFields:
    """The fields of a config.json, each read as what it has to be. A missing field is its default, which is the one of
    transformers' class; a null one is not. Raises UsageError that names the field."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of `least` or more. default None: the field has to be there."""
        if name not in self.values and default is None:
            raise UsageError(f"config.json lacks {name!r}", "fetch the checkpoint again")
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong_value(name, value, f"a whole number of {least} or more")
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """A whole number of 1 or more, or null."""
        return None if self.values.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: float) -> float:
        """A finite number of 0 or more."""
        value = self.values.get(name, default)
        if not is_number(value) or value < 0:
            raise wrong_value(name, value, "a number of 0 or more")
        return float(value)

    def factor(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value: Any = self.values.get(name, default)
        if not is_number(value) or value <= 0:
            raise wrong_value(name, value, "a number above 0")
        return float(value)

    def optional_factor(self, name: str, default: float | None) -> float | None:
        """A finite number above 0, or null."""
        value = self.values.get(name, default)
        return None if value is None else self.factor(name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; false where the field is null."""
        value = self.values.get(name, default)
        if not isinstance(value, bool | None):
            raise wrong_value(name, value, "true or false")
        return bool(value)

    def layer_types(self, num_layers: int) -> list[str] | None:
        """`full_attention` or `sliding_attention` a layer; None where config.json does not say."""
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


def plain_decoder(
    fields: ConfigFields,
    architecture: str,
    missing: Mapping[str, Any],
    eps: str = "rms_norm_eps",
    activation: str = "hidden_act",
) -> ModelSpec:
    """The decoder with full attention, without biases and without a norm on heads, as config.json shapes it.

    missing: what the family's class takes for max_position_embeddings and other fields where they are not in config.json;
    partial_rotary_factor in it says that the family can rotate a part of the head. eps, activation: the fields' names.
    """
    hidden = fields.integer("hidden_size", missing.get("hidden_size"))
    heads = fields.integer("num_attention_heads", missing.get("num_attention_heads"))
    layers = fields.integer("num_hidden_layers", missing.get("num_hidden_layers"))
    kv_heads = fields.optional_integer("num_key_value_heads", missing.get("num_key_value_heads")) or heads
    if heads % kv_heads:
        raise UsageError(f"{heads} attention heads do not divide into {kv_heads} KV heads", "check config.json")
    head_dim = fields.optional_integer("head_dim", missing.get("head_dim")) or hidden // heads
    if head_dim % 2:
        raise wrong_value("head_dim", head_dim, "even: RoPE rotates pairs")
    act = fields.values.get(activation, missing.get(activation, "silu"))
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise UsageError(f"unknown activation {act!r} ({activation})", f"known: {', '.join(ACTIVATIONS)}")
    max_positions = fields.integer("max_position_embeddings", missing["max_position_embeddings"])
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", missing.get("vocab_size")),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", missing.get("intermediate_size")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        activation=ACTIVATIONS[act],
        rms_norm_eps=fields.number(eps, missing.get(eps, 1e-6)),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied=fields.flag("tie_word_embeddings", missing.get("tie_word_embeddings", False)),
        max_position_embeddings=max_positions,
        sliding_windows=(None,) * layers,
        rope=rope_parameters(fields.values, max_positions, head_dim, missing),
        config=fields.values,
    )


def every_nth(num_layers: int, pattern: int) -> list[str]:
    """Windows on all layers but every `pattern`-th."""
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def windows_of(types: list[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer: `window` where its type is sliding_attention."""
    if window is None and "sliding_attention" in types:
        raise UsageError(
            "layer_types in config.json has sliding_attention, and there is no sliding_window", "check config.json"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
