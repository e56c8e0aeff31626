"""Multimodal models: only the language model is read, not images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_cli.model.families.reader import OTHER_FIELDS
from cacheblend_cli.model.families.values import wrong_value

# All but the first two are image fields.
FIELDS = (
    "text_config", "tie_word_embeddings", "vision_config", "multimodal_projector_bias", "projector_hidden_act",
    "vision_feature_layer", "spatial_merge_size", "mm_tokens_per_image", "audio_config", "vision_soft_tokens_per_image",
    "audio_soft_tokens_per_image",
)  # fmt: skip
_EYES = "visual vision_tower vision_model vision_embedder multi_modal_projector audio_tower embed_vision embed_audio"
EYES = tuple(f"{base}{part}." for base in ("", "model.") for part in _EYES.split())


@dataclass(frozen=True)
class Wrapper:
    """One model_type of transformers with a text_config."""

    model_type: str
    architectures: tuple[str, ...]
    text: str  # the text_config's model_type if it has none
    flat: bool = False  # a config without text_config has the language model's fields itself
    tied: bool = False  # default of tie_word_embeddings

    def knows(self, field: str) -> bool:
        return field in FIELDS or field in OTHER_FIELDS

    def text_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the language model's config, including the outer config's common fields."""
        inner = config.get("text_config")
        if inner is None and self.flat:
            inner = {k: v for k, v in config.items() if k not in (*FIELDS, "model_type", "architectures")}
        if not isinstance(inner, dict):
            raise wrong_value("text_config", inner, "an object")
        both = {name: config[name] for name in ("dtype", "torch_dtype", "eos_token_id") if name in config}
        tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings", self.tied))
        if self.flat:
            tied = tied or inner.get("tie_word_embeddings", False)
        return {"model_type": self.text} | both | inner | {"tie_word_embeddings": tied, "architectures": None}


WRAPPERS = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper("mistral3", ("Mistral3ForConditionalGeneration",), "mistral", tied=True),
        Wrapper("qwen2_vl", ("Qwen2VLForConditionalGeneration",), "qwen2_vl_text", flat=True),
        Wrapper("qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), "qwen2_5_vl_text", flat=True),
        Wrapper("qwen3_vl", ("Qwen3VLForConditionalGeneration",), "qwen3_vl_text"),
        Wrapper("qwen3_5", ("Qwen3_5ForConditionalGeneration",), "qwen3_5_text"),
        Wrapper("qwen3_5_moe", ("Qwen3_5MoeForConditionalGeneration",), "qwen3_5_moe_text"),
        Wrapper("gemma4", ("Gemma4ForConditionalGeneration",), "gemma4_text", tied=True),
        Wrapper("gemma3n", ("Gemma3nForConditionalGeneration",), "gemma3n_text", tied=True),
        Wrapper("gemma4_unified", ("Gemma4UnifiedForConditionalGeneration",), "gemma4_unified_text", tied=True),
        Wrapper("gemma3", ("Gemma3ForConditionalGeneration",), "gemma3_text", tied=True),
    )
}
