"""GGUF files of families beside Llama and Qwen, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoints import TEMPLATE
from gguf import GGMLQuantizationType as Kind
from gguf_files import begun, ended, permuted
from hub_models import HubModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

PERMUTED = ("llama", "granite", "smollm3")
OF_EXPERT = re.compile(r"(model\.layers\.\d+\.\w+\.experts\.)(\d+)\.(\w+)\.weight")
MIXTRAL = {"w1": "gate", "w2": "down", "w3": "up"}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 8.0]}


@dataclass(frozen=True)
class GGUFFamily:
    """A family to write as GGUF."""

    name: str
    arch: str
    config: Callable[..., Any]
    shape: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)  # additional metadata; None removes a key
    factors: dict[str, list[float]] = field(default_factory=dict)  # RoPE tensors
    kind: str = "F32"  # type of the matrices
    alone: bool = False  # each expert has its own tensors, as in old files
    tokenizer: str | None = None

    def write(self, folder: Path, file: Path) -> None:
        """A checkpoint in `folder` and its GGUF file: both hold the values that the file's kind can hold."""
        shape = {"intermediate_size": 64, "num_hidden_layers": 3} | self.shape
        HubModel(self.name, self.config, shape, tokenizer=self.tokenizer, template=TEMPLATE).write(folder)
        state = {name: self._rounded(name, t.float()) for name, t in load_file(folder / "model.safetensors").items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        writer, config, names = begun(folder, file, self.arch, extra=self.extra)
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for name, tensor in self._parts(state).items():
            own, data = names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.contiguous().numpy()
            part = name.split(".")[-2]
            if "_exps." in name or ".ffn_" in name:
                own = name
            if "sinks" in name:
                own = f"{own}.weight"
            if self.arch.startswith("gemma") and name.endswith("norm.weight"):
                data = data + np.float32(1)
            if self.arch in PERMUTED and part in heads:
                data = permuted(data, heads[part])
            assert own is not None, name
            kind = (
                Kind[self.kind]
                if data.ndim > 1 and "ffn_gate_inp" not in own and not name.endswith("bias")
                else Kind.F32
            )
            data = data.squeeze(0) if data.shape[0] == 1 and data.ndim > 1 else data  # as the converter does
            writer.add_tensor(
                own, gguf.quantize(data, kind) if data.ndim > 1 else data, raw_dtype=kind if kind != Kind.F32 else None
            )
        for name, values in self.factors.items():
            writer.add_tensor(name, np.array(values, np.float32))
        ended(writer)

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        """What is left of a weight that is quantised along the inputs."""
        if tensor.dim() < 2 or self.kind == "F32" or "gate.weight" in name or "router" in name or name.endswith("bias"):
            return tensor
        turned = tensor.dim() == 3  # gpt-oss's experts: inputs first
        data = np.ascontiguousarray(tensor.transpose(-1, -2) if turned else tensor)
        back = torch.from_numpy(
            gguf.dequantize(gguf.quantize(data, Kind[self.kind]), Kind[self.kind]).reshape(data.shape).copy()
        )
        return back.transpose(-1, -2).contiguous() if turned else back

    def _parts(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """With each layer's experts in one tensor, under the file's own names."""
        parts, merged = dict[str, Tensor](), dict[str, list[Tensor]]()
        for name, tensor in state.items():
            if match := OF_EXPERT.fullmatch(name):
                part = MIXTRAL.get(match[3], match[3].removesuffix("_proj"))
                layer = name.split(".")[2]
                if self.alone:
                    parts[f"blk.{layer}.ffn_{part}.{match[2]}.weight"] = tensor
                    continue
                merged.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(
                    tensor
                )  # in the order of the numbers
            elif ".experts." in name:  # gpt-oss: gate and up in turn, inputs first
                own, layer = name.split(".")[-1], name.split(".")[2]
                kind = "bias" if own.endswith("_bias") else "weight"
                turned = tensor.transpose(1, 2) if kind == "weight" else tensor
                if own.startswith("down"):
                    parts[f"blk.{layer}.ffn_down_exps.{kind}"] = turned
                else:
                    parts[f"blk.{layer}.ffn_gate_exps.{kind}"] = turned[:, 0::2]
                    parts[f"blk.{layer}.ffn_up_exps.{kind}"] = turned[:, 1::2]
            else:
                parts[name] = tensor
        return parts | {name: torch.stack(tensors) for name, tensors in merged.items()}


GEMMA = {"head_dim": 16, "sliding_window": 20}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
IN_FILE = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE = {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 0.25}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IN_FILE_MOE = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 20, "rope_parameters": YARN}
IN_FILE_OSS = IN_FILE | IN_FILE_MOE | {"expert_feed_forward_length": 64, "attention.sliding_window": 20}

FAMILIES = [
    GGUFFamily("gemma", "gemma", GemmaConfig, {"head_dim": 16}),
    GGUFFamily("gemma 2", "gemma2", Gemma2Config, GEMMA | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0},
               {"attention.sliding_window": 20, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 30.0}, kind="Q8_0"),
    GGUFFamily("gemma 3", "gemma3", Gemma3TextConfig,
               GEMMA | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_parameters": LINEAR},
               {"attention.sliding_window": 20, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, kind="Q8_0"),
    GGUFFamily("phi 3 mini 4k", "phi3", Phi3Config, {"sliding_window": 30, "num_key_value_heads": 4},
               {"attention.sliding_window": 30, "attention.key_length": None, "attention.value_length": None}, kind="Q8_0"),
    GGUFFamily("phi 3 mini 128k", "phi3", Phi3Config,
               {"sliding_window": None, "original_max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG}},
               {"attention.sliding_window": 0, "rope.scaling.original_context_length": 64,
                "rope.scaling.attn_factor": (1 + np.log(8) / np.log(64)).item() ** 0.5},
               {"rope_factors_long.weight": LONG["long_factor"], "rope_factors_short.weight": LONG["short_factor"]}),
    GGUFFamily("phi 4 mini", "phi3", Phi3Config,
               {"sliding_window": None, "hidden_size": 64, "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
               {"rope.dimension_count": 12}),
    GGUFFamily("granite 3", "granite", GraniteConfig, GRANITE | {"tie_word_embeddings": True},
               {"embedding_scale": 2.0, "attention.scale": 0.2, "residual_scale": 0.6, "logit_scale": 0.25}, kind="Q8_0"),
    GGUFFamily("smollm 3", "smollm3", SmolLM3Config, {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    GGUFFamily("olmo 2", "olmo2", Olmo2Config, {}, kind="Q8_0"),
    GGUFFamily("glm 4", "glm4", Glm4Config, {"head_dim": 16, "attention_bias": True}, {"rope.dimension_count": 8}),
    GGUFFamily("qwen 2 moe", "qwen2moe", Qwen2MoeConfig, MOE | {"shared_expert_intermediate_size": 64},
               IN_FILE_MOE | {"expert_shared_feed_forward_length": 64}, kind="Q8_0"),
    GGUFFamily("qwen 3 moe", "qwen3moe", Qwen3MoeConfig, MOE | {"norm_topk_prob": True, "head_dim": 16}, IN_FILE_MOE, kind="Q8_0"),
    GGUFFamily("mixtral", "llama", MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2},
               {"expert_count": 4, "expert_used_count": 2}, kind="Q8_0"),
    GGUFFamily("mixtral, an old file", "llama", MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2},
               {"expert_count": 4, "expert_used_count": 2}, alone=True),
    GGUFFamily("gpt-oss", "gpt-oss", GptOssConfig, OSS, IN_FILE_OSS),
    GGUFFamily("gpt-oss, mxfp4", "gpt-oss", GptOssConfig, OSS, IN_FILE_OSS, kind="MXFP4"),
]  # fmt: skip
