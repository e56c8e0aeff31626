"""What a decoder is made of, read from a HF `config.json`. The families we know differ only in these fields."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_cli.errors import NotFoundError, UsageError

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Family:
    """How one architecture differs from Llama.

    qkv_bias: "config" reads `attention_bias`, True and False are fixed. qk_norm: RMSNorm on each head of q and k.
    """

    model_type: str
    qkv_bias: bool | str = "config"
    qk_norm: bool = False
    sliding_window: str = (
        "never"  # "never" | "config" (all layers) | "layer_types" (as layer_types or max_window_layers say)
    )
    rms_norm_eps: float = 1e-6


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, sliding_window="config"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, sliding_window="layer_types"),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, sliding_window="layer_types"),
}


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only model. Sizes in elements; `sliding_windows` has an entry a layer (None: no window)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    rope: dict[str, Any]
    config: dict[str, Any]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_element: float) -> float:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_element

    @property
    def num_matmul_params(self) -> int:
        """Weights that every row of a prefill is multiplied with (embeddings and the output head excluded)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of the checkpoint in `model_dir`. Raises NotFoundError without config.json, UsageError on what we do not know."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise NotFoundError(
            f"{model_dir} has no config.json, so it is no model directory",
            "give --model a directory with config.json, tokenizer.json and *.safetensors, or a hub id",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}", "fetch the checkpoint again") from error
    return spec_from_config(config)


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Translate a HF config. Raises UsageError on an unknown architecture, activation, RoPE type or a missing field."""
    architecture = (config.get("architectures") or ["(none)"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise UsageError(f"unknown architecture {architecture}", f"known: {', '.join(FAMILIES)}")
    try:
        hidden, heads, layers = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        intermediate, vocab = int(config["intermediate_size"]), int(config["vocab_size"])
    except KeyError as error:
        raise UsageError(f"config.json lacks {error}", "fetch the checkpoint again") from error
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UsageError(f"unknown activation {activation!r}", f"known: {', '.join(ACTIVATIONS)}")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UsageError(f"{heads} attention heads do not divide into {kv_heads} KV heads", "check config.json")
    bias = bool(config.get("attention_bias", False)) if family.qkv_bias == "config" else bool(family.qkv_bias)
    max_positions = int(config.get("max_position_embeddings", 2048))
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or hidden // heads),
        activation=activation,
        rms_norm_eps=float(config.get("rms_norm_eps", family.rms_norm_eps)),
        qkv_bias=bias,
        o_bias=bias and family.qkv_bias == "config",
        mlp_bias=bool(config.get("mlp_bias", False)) and family.model_type == "llama",
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=max_positions,
        sliding_windows=_sliding_windows(config, family, layers),
        rope=_rope_parameters(config, max_positions),
        config=config,
    )


def _sliding_windows(config: dict[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family.sliding_window == "never" or window is None:
        return (None,) * layers
    if family.sliding_window == "config":
        return (int(window),) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        first = int(config.get("max_window_layers", 28))
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise UsageError(
            f"layer_types in config.json: {sorted(unknown) or len(types)}",
            f"known: sliding_attention, full_attention, one for each of the {layers} layers",
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _rope_parameters(config: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or the older rope_theta + rope_scaling pair brought to that form."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    parameters.setdefault("rope_type", "default")
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if parameters["rope_type"] not in ROPE_TYPES:
        raise UsageError(f"unknown RoPE type {parameters['rope_type']!r}", f"known: {', '.join(ROPE_TYPES)}")
    if "original_max_position_embeddings" in config:
        parameters.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    return parameters
