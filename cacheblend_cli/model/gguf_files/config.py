"""config.json from a GGUF file's metadata. A key that changes the computation is supported or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_files.architectures import ARCHITECTURES, Keys, Metadata, architecture_of
from cacheblend_cli.model.rope import inverse_frequencies

EMBEDDING, ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # tensors with RoPE factors
Factors = Mapping[str, np.ndarray]
# Settings of Llama 3.1, 3.2 and 3.3; a GGUF file only has the factors derived from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)
# Keys of an architecture, without its name as a prefix.
KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned",  # whether the model was trained with the factor; the result is the same
}  # fmt: skip
BIASES = {  # fields of config.json that are true if the tensor is present
    "attention_bias": (
        "blk.0.attn_q.bias",
        ("llama", "qwen3", "granite", "smollm3", "olmo2", "glm4", "gemma", "qwen3_moe", "gpt_oss"),
    ),
    "mlp_bias": ("blk.0.ffn_gate.bias", ("llama", "granite", "smollm3")),
    "qkv_bias": ("blk.0.attn_q.bias", ("qwen2_moe",)),
}


def config_of(
    metadata: Metadata, tensors: Mapping[str, tuple[int, ...]], rope_factors: Factors, dtype: str
) -> dict[str, Any]:
    """Return the config. tensors: shapes by name. rope_factors: tensors with RoPE factors. dtype: of the weights."""
    name = metadata.get("general.architecture")
    if metadata.get("general.type", "model") != "model":
        raise UsageError(f"the GGUF file is not a model but a {metadata['general.type']}", "give the file of its model")
    if name not in ARCHITECTURES:
        raise UsageError(
            f"unknown architecture {name!r} in the GGUF file", f"known in GGUF files: {', '.join(ARCHITECTURES)}"
        )
    keys, architecture = Keys(metadata, name), architecture_of(name, metadata)
    keys.refuse_unknown({*KNOWN, *architecture.keys})
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    context, layers = keys.integer("context_length"), keys.integer("block_count")
    if layers > len(tensors):
        raise keys.refusal("block_count", f"the file has {len(tensors)} tensors, and each layer has several")
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.refusal("attention.value_length", f"only {head_dim}, the width of a head, is implemented")
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not architecture.partial:
        raise keys.refusal("rope.dimension_count", f"only {head_dim}, the width of a head, is implemented")
    if EMBEDDING not in tensors:
        raise UsageError(f"the GGUF file has no tensor {EMBEDDING}", "fetch it again, or use another model")
    config = {
        "model_type": architecture.model_type,
        "vocab_size": tensors[EMBEDDING][0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length", keys.optional_integer("expert_feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "max_position_embeddings": context,
        "rope_parameters": _rope_of(keys, rotated, context, rope_factors),
        "dtype": dtype,
    }
    if architecture.partial:
        config["partial_rotary_factor"] = rotated / head_dim
    for field, (tensor, types) in BIASES.items():
        if architecture.model_type in types:
            config[field] = tensor in tensors
    return config if architecture.more is None else config | architecture.more(keys, config)


def _rope_of(keys: Keys, rotated: int, context: int, given: Factors) -> dict[str, Any]:
    """Return RoPE's parameters. rotated: rotated channels of a head. given: the file's tensors named in FACTORS."""
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.values.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", 1.0)
    factors = given.get(ROPE_FACTORS)
    if LONG_FACTORS in given and SHORT_FACTORS in given:
        return _longrope(keys, theta, given)
    if factors is not None and not np.allclose(factors, 1.0):
        if kind != "none":
            raise keys.refusal("rope.scaling.type", f"beside {ROPE_FACTORS} it is not implemented")
        return _llama3(theta, rotated, context, factors)
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", max(1, round(context / factor)))
        rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        return rope | {"original_max_position_embeddings": original}
    if kind != "none":
        raise keys.refusal("rope.scaling.type", "known: none, linear, yarn")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3(theta: float, head_dim: int, context: int, factors: np.ndarray) -> dict[str, Any]:
    """Return the Llama 3.x settings that produce these factors."""
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


def _longrope(keys: Keys, theta: float, given: Factors) -> dict[str, Any]:
    """Return the RoPE parameters of a Phi-3, whose files lack the type."""
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": [float(f) for f in given[SHORT_FACTORS]],
        "long_factor": [float(f) for f in given[LONG_FACTORS]],
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
