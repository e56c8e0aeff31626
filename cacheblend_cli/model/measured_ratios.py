"""Ratios that were measured for published files with the procedure of `models check` (study/own_ratio.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredRatio:
    """The smallest ratio within the limits of `models check`, on twelve prompts of MuSiQue's passages in bfloat16."""

    file: str
    ratio: float
    kl_mean: float  # KL(full prefill || blended) at that ratio, nats a token
    kl_p90: float

    def __str__(self) -> str:
        measured = f"mean KL {self.kl_mean:g}, 90th percentile {self.kl_p90:g}"
        return f"measured for this model on passages of MuSiQue, {measured}"


MEASURED_RATIOS = {
    "1dff70ef9e211d0ab8951aa641e75aa1": MeasuredRatio("SmolLM2-135M-Instruct.Q4_1.gguf", 0.5, 0.011, 0.026),
    "24a425df14b444ea9334a390523ab4e2": MeasuredRatio("gemma3-270m-q4_k_m.gguf", 0.15, 0.009, 0.019),
    "889afe337bccfb8b601bdc37a2428425": MeasuredRatio("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 0.3, 0.011, 0.039),
    "df64934f4e28ad785ba26d8f3d6df2f0": MeasuredRatio("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 0.5, 0.007, 0.02),
}
"""By digest of the weights (`weights_digest`)."""
