"""RoPE's parameters in transformers' form, from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_files.architectures import Keys
from cacheblend_cli.model.rope import inverse_frequencies

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # tensors with RoPE factors
Factors = Mapping[str, np.ndarray]
# Settings of Llama 3.1, 3.2 and 3.3; a GGUF file only has the factors derived from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)


def rope_of(keys: Keys, rotated: int, context: int, given: Factors) -> dict[str, Any]:
    """Return RoPE's parameters. rotated: rotated channels of a head. given: the file's tensors named in FACTORS."""
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.values.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if "rope.scale_linear" in keys.values and kind == "none" and factor != 1:
        kind = "linear"
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
