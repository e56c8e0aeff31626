"""Architectures of GGUF files: their keys, the transformers model of each, and the config fields that these imply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.values import LARGEST_INTEGER, is_number

Metadata = Mapping[str, Any]
Config = dict[str, Any]

EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
WINDOW = "attention.sliding_window"


class Keys:
    """Typed keys of the file's architecture."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        prefix = f"{architecture}."
        self.prefix = prefix
        self.values = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}

    def refuse_unknown(self, known: Collection[str]) -> None:
        for key, value in self.values.items():
            if key not in known and value not in (None, False, 0, "", "none"):
                raise self.refusal(key, "the key is unknown, and may change what the model computes")

    def refusal(self, key: str, why: str) -> UsageError:
        return UsageError(
            f"the GGUF file has {self.prefix}{key} = {self.values.get(key)!r}: {why}", "use another model"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of 1 or more. A list with a number per layer must have the same number throughout."""
        value = self._given(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise self.refusal(key, "layers that differ are not implemented")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_INTEGER:
            raise self.refusal(key, f"must be a whole number from 1 to {LARGEST_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        if not is_number(value) or value <= 0:
            raise self.refusal(key, "must be a number above 0")
        return float(f"{value:.7g}")  # it was a float32: 1e-05 instead of 9.999999747378752e-06

    def optional_integer(self, key: str) -> int | None:
        """Return a whole number of 1 or more; None if it is missing or 0."""
        return self.integer(key) if self.values.get(key) else None

    def _given(self, key: str, default: float | None) -> Any:
        if (value := self.values.get(key, default)) is None:
            raise UsageError(f"the GGUF file lacks {self.prefix}{key}", "fetch it again, or use another model")
        return value


@dataclass(frozen=True)
class Architecture:
    """Mapping of a `general.architecture` to transformers."""

    model_type: str
    permuted: bool = False  # llama.cpp's converter reorders the rows of Q and K
    norm_offset: float = 0.0  # what the converter adds to the norms' weights
    keys: Collection[str] = ()  # keys the file may have, besides the common ones
    more: Callable[[Keys, Config], Config] | None = None  # (keys, common config) -> fields to change in the config
    partial: bool = False  # RoPE may rotate a part of the head


def architecture_of(name: str, metadata: Metadata) -> Architecture:
    """Return the architecture of this name. A Mixtral is named llama too, but has experts."""
    return MIXTRAL if name == "llama" and metadata.get("llama.expert_count") else ARCHITECTURES[name]


def _gemma2(keys: Keys, config: Config) -> Config:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scalar(config, widest=46),
        "sliding_window": keys.integer(WINDOW, 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, config: Config) -> Config:
    own = {} if keys.values.get("final_logit_softcapping") is None else {
        "final_logit_softcapping": keys.number("final_logit_softcapping")
    }  # fmt: skip
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    return own | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scalar(config, widest=62),
        "sliding_window": keys.integer(WINDOW, 1024),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _scalar(config: Config, widest: int) -> int:
    """Return the divisor of scores under the root. GGUF files lack it: llama.cpp infers it from the number of layers,
    since the largest model has a different one."""
    if config["num_hidden_layers"] == widest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _granite(keys: Keys, config: Config) -> Config:
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _phi3(keys: Keys, config: Config) -> Config:
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {"sliding_window": keys.optional_integer(WINDOW), "original_max_position_embeddings": original}


def _mixtral(keys: Keys, config: Config) -> Config:
    return {"num_local_experts": keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}


def _qwen_moe(keys: Keys, config: Config) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
        "norm_topk_prob": config["model_type"] == "qwen3_moe",
    }


def _qwen2_moe(keys: Keys, config: Config) -> Config:
    shared = keys.integer("expert_shared_feed_forward_length", config["intermediate_size"])
    return _qwen_moe(keys, config) | {"shared_expert_intermediate_size": shared}


def _gpt_oss(keys: Keys, config: Config) -> Config:
    rope = config["rope_parameters"]
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": keys.integer(WINDOW),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norm_offset=1.0, more=lambda keys, config: {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Architecture(
        "gemma2", norm_offset=1.0, more=_gemma2,
        keys=(WINDOW, "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Architecture(
        "gemma3_text", norm_offset=1.0, more=_gemma3,
        keys=(WINDOW, "attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping"),
    ),
    "phi3": Architecture("phi3", more=_phi3, partial=True, keys=(WINDOW, "rope.scaling.attn_factor")),
    "granite": Architecture(
        "granite", permuted=True, more=_granite,
        keys=("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
    ),
    "smollm3": Architecture("smollm3", permuted=True, more=lambda keys, config: {"no_rope_layer_interval": 4}),
    "olmo2": Architecture("olmo2"),
    "glm4": Architecture("glm4", partial=True),
    "qwen2moe": Architecture("qwen2_moe", more=_qwen2_moe, keys=(*EXPERTS, "expert_shared_feed_forward_length")),
    "qwen3moe": Architecture("qwen3_moe", more=_qwen_moe, keys=EXPERTS),
    "gpt-oss": Architecture("gpt_oss", more=_gpt_oss, keys=(*EXPERTS, WINDOW)),
}  # fmt: skip
MIXTRAL = Architecture("mixtral", permuted=True, more=_mixtral, keys=EXPERTS[:2])
