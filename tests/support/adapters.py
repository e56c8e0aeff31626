"""LoRA adapters as peft saves them, with random weights, and what they add by the definition."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: dict[str, Any] = {  # as peft 0.17 saves it
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "m", "bias": "none", "corda_config": None,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"], "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
    "use_rslora": False,
}  # fmt: skip


def write_adapter(
    folder: Path,
    checkpoint: Path,
    modules: Iterable[str],
    ranks: dict[str, int] | None = None,
    seed: int = 1,
    **config: Any,
) -> dict[str, tuple[Tensor, Tensor]]:
    """An adapter of these modules, by the ends of their names. ranks: of modules, by the ends of theirs, that have
    another than r. Returns (A, B) of each changed weight."""
    folder.mkdir(parents=True, exist_ok=True)
    values = CONFIG | {"target_modules": sorted(modules)} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    generator, pairs, tensors = torch.Generator().manual_seed(seed), {}, {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(modules)) or weight.ndim != 2:
            continue
        rank = next((r for end, r in (ranks or {}).items() if module.endswith(end)), values["r"])
        down = torch.randn(rank, weight.shape[1], generator=generator) * 0.1
        up = torch.randn(weight.shape[0], rank, generator=generator) * 0.1
        pairs[name] = down, up
        base = f"base_model.model.{module if module.startswith(('model.', 'lm_head')) else f'model.{module}'}"
        tensors |= {f"{base}.lora_A.weight": down, f"{base}.lora_B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return pairs


def merge(checkpoint: Path, pairs: dict[str, tuple[Tensor, Tensor]], scale_of: dict[str, float]) -> None:
    """Add scale * B A to the checkpoint's own file; scale_of: by the ends of the modules' names."""
    weights = load_file(checkpoint / "model.safetensors")
    for name, (down, up) in pairs.items():
        scale = next(s for end, s in scale_of.items() if name.endswith(f"{end}.weight"))
        weights[name] = (weights[name].double() + scale * up.double() @ down.double()).float()
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
