"""Models with random weights in the shape of a configuration, created on the device, and transformers' model over the
same weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import KernelBackend, select_backend
from torch import Tensor

from cacheblend_cli.demo import model_dir
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.model.weight_map import expected_shapes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def read_config(name: str) -> dict[str, Any]:
    """Read a file of configs/ by its stem, or the handbook model's; "tiny" is a shape for any CPU."""
    if name == "tiny":
        return TINY_CONFIG
    path = model_dir() / "config.json" if name == "handbook" else CONFIGS / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class RandomModel(LoadedModel):
    """A model; weights: the decoder's tensors by the names of `load_weights`."""

    weights: dict[str, Tensor] = field(default_factory=dict)


def random_model(
    name: str, config: dict[str, Any], device: torch.device, dtype: torch.dtype, kernels: KernelBackend | None = None
) -> RandomModel:
    """Return a model with normal weights of standard deviation 1 / sqrt(inputs), norms of 1, and the demo model's
    tokenizer."""
    spec = spec_from_config(config)
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for _, target, _, shape in expected_shapes(spec).values():
        if target not in weights:
            weights[target] = torch.ones(shape, dtype=dtype, device=device)
            if len(shape) == 2:
                weights[target].normal_(0, shape[1] ** -0.5, generator=generator)
    if spec.tied:
        weights["lm_head"] = weights["embed"]
    return RandomModel(
        name=name,
        path=model_dir(),
        spec=spec,
        dtype=str(dtype).removeprefix("torch."),
        decoder=Decoder(spec, dict(weights), kernels or select_backend("auto", device), dtype),
        tokenizer=Tokenizer(model_dir()),
        fingerprint=f"random weights of seed 0, {name}, {dtype}",
        eos_ids=frozenset(),
        weights=weights,
    )


def transformers_model(model: RandomModel) -> Any:
    """Return transformers' model with SDPA, whose parameters are views of the decoder's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    decoder, spec = model.decoder, model.spec
    config = dict(spec.config)
    twin_config = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(twin_config, dtype=decoder.dtype, attn_implementation="sdpa")
    shapes = expected_shapes(spec).items()
    state = {name: model.weights[target][start : start + shape[0]] for name, (shape, target, start, _) in shapes}
    if spec.tied:
        state["lm_head.weight"] = model.weights["lm_head"]
    twin.load_state_dict(state, strict=True, assign=True)
    with decoder.device:  # RoPE frequencies are not parameters, and the "meta" device has none
        twin.model.rotary_emb = type(twin.model.rotary_emb)(twin_config)
    return twin.eval()
