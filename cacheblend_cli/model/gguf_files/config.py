"""config.json from a GGUF file's metadata. A key that changes what the model computes is understood or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.rope_frequencies import inverse_frequencies

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """What `general.architecture` is for transformers. permuted: llama.cpp's converter has reordered the rows of Q and K."""

    model_type: str
    class_name: str
    permuted: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}

# Keys of an architecture, without its name before them.
KNOWN = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",  # says that the factor was trained with: the result is the same
    "rope.scale_linear",  # the linear factor, in older files
    "vocab_size",
    "tensor_data_layout",
}
ROPE_FACTORS = "rope_freqs.weight"
# What Llama 3.1, 3.2 and 3.3 have; a GGUF file holds only the factors that come of it.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)


def config_of(
    metadata: Metadata, tensors: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None, dtype: str
) -> dict[str, Any]:
    """tensors: their shapes. rope_factors: the tensor `rope_freqs.weight`, [head_dim / 2]. dtype: what the weights are in."""
    name = metadata.get("general.architecture")
    if metadata.get("general.type", "model") != "model":
        raise UsageError(f"the GGUF file is no model but a {metadata['general.type']}", "give the file of its model")
    if name not in ARCHITECTURES:
        raise UsageError(
            f"unknown architecture {name!r} in the GGUF file", f"known in GGUF files: {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(metadata, name)
    keys.refuse_unknown()
    architecture = ARCHITECTURES[name]
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    context = keys.integer("context_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.refusal(key, f"only {head_dim}, the width of a head, is implemented")
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": _rows(tensors, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "max_position_embeddings": context,
        "rope_parameters": _rope(keys, head_dim, context, rope_factors),
        "dtype": dtype,
    }
    if architecture.model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    return config


class _Keys:
    """The keys of the file's architecture, each read as what it has to be."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        prefix = f"{architecture}."
        self.prefix = prefix
        self.values = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}

    def refuse_unknown(self) -> None:
        for key, value in self.values.items():
            if key not in KNOWN and value not in (None, False, 0, "", "none"):
                raise self.refusal(key, "that key is not known, and it may change what the model computes")

    def refusal(self, key: str, why: str) -> UsageError:
        return UsageError(
            f"the GGUF file has {self.prefix}{key} = {self.values.get(key)!r}: {why}", "use another model"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more; of a list with a number a layer, the one that all of them are."""
        value = self.values.get(key, default)
        if value is None:
            raise UsageError(f"the GGUF file lacks {self.prefix}{key}", "fetch it again, or use another model")
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise self.refusal(key, "layers that differ are not implemented")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, "it has to be a whole number of 1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None:
            raise UsageError(f"the GGUF file lacks {self.prefix}{key}", "fetch it again, or use another model")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal(key, "it has to be a number above 0")
        return float(f"{value:.7g}")  # it was a float32: 1e-05, and not 9.999999747378752e-06


def _rope(keys: _Keys, head_dim: int, context: int, factors: np.ndarray | None) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.values.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if "rope.scale_linear" in keys.values and kind == "none" and factor != 1:
        kind = "linear"
    if factors is not None and not np.allclose(factors, 1.0):
        if kind != "none":
            raise keys.refusal("rope.scaling.type", f"beside {ROPE_FACTORS} it is not implemented")
        return _llama3(theta, head_dim, context, factors)
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", max(1, round(context / factor)))
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    if kind != "none":
        raise keys.refusal("rope.scaling.type", "known: none, linear, yarn")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3(theta: float, head_dim: int, context: int, factors: np.ndarray) -> dict[str, Any]:
    """The settings of Llama 3.x that these factors come of."""
    plain, _ = inverse_frequencies({"rope_type": "default", "rope_theta": theta}, head_dim, context, context)
    for factor in LLAMA3_FACTORS:
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}
        scaled, _ = inverse_frequencies(rope, head_dim, context, context)
        expected = (plain / scaled).numpy()
        if expected.shape == factors.shape and np.allclose(factors, expected, rtol=1e-3):
            return rope
    raise UsageError(
        f"the GGUF file has factors of RoPE's frequencies ({ROPE_FACTORS}) that are not those of a Llama 3",
        "use another model",
    )


def _rows(tensors: Mapping[str, Collection[int]], name: str) -> int:
    if name not in tensors:
        raise UsageError(f"the GGUF file has no tensor {name}", "fetch it again, or use another model")
    return next(iter(tensors[name]))
