"""RoPE's inverse frequencies for every type of scaling, as transformers' ROPE_INIT_FUNCTIONS have them (a test compares
them). Written here because importing transformers takes as long as answering a short question.

rope: parameters as `families.rope_fields.rope_parameters` gives them, checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Rope = Mapping[str, Any]


def inverse_frequencies(rope: Rope, head_dim: int, max_positions: int, seq_len: int) -> tuple[Tensor, float]:
    """[head_dim / 2] fp32, and the factor on cos and sin, for a prompt of seq_len tokens. max_positions: the model's
    `max_position_embeddings`. Raises ArithmeticError or ValueError where the parameters have no answer."""
    kind, theta = rope["rope_type"], rope["rope_theta"]
    if kind == "dynamic":  # NTK: the base grows with what is beyond the trained length
        grown = rope["factor"] * max(seq_len, max_positions) / max_positions - (rope["factor"] - 1)
        theta = theta * grown ** (head_dim / (head_dim - 2))
    plain: Tensor = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(rope, plain), 1.0
    if kind == "yarn":
        return _yarn(rope, plain, max_positions)
    if kind == "longrope":
        return _longrope(rope, plain, max_positions, seq_len)
    return plain, 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Slow dimensions (few turns over the original length) divided by the factor, fast ones as they are, a ramp between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / plain)
    kept = (turns - low) / (high - low)  # the share of the unscaled frequency
    return torch.where(
        turns < low,
        plain / rope["factor"],
        torch.where(turns > high, plain, (1 - kept) * plain / rope["factor"] + kept * plain),
    )


def _yarn(rope: Rope, plain: Tensor, max_positions: int) -> tuple[Tensor, float]:
    """As llama3, with a ramp over dimensions; and attention a little sharper (arXiv 2309.00071)."""
    original, dim = rope["original_max_position_embeddings"], 2 * plain.shape[0]
    factor = rope["factor"] or max_positions / original

    def dimension(turns: float) -> float:
        """The one that turns so often over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    scaled = ramp.clamp(0, 1)
    scaling = rope.get("attention_factor")
    if scaling is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        scaling = _sharper(factor, over) / _sharper(factor, under) if over and under else _sharper(factor, 1.0)
    return plain / factor * scaled + plain * (1 - scaled), float(scaling)


def _sharper(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _longrope(rope: Rope, plain: Tensor, max_positions: int, seq_len: int) -> tuple[Tensor, float]:
    """Each pair of dimensions has a factor of its own: one for short prompts, another for long ones (arXiv 2402.13753)."""
    original = rope["original_max_position_embeddings"]
    factors = torch.tensor(rope["long_factor" if seq_len > original else "short_factor"], dtype=torch.float32)
    factor, scaling = rope.get("factor") or max_positions / original, rope.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return plain / factors, float(scaling)
