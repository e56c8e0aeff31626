"""Random checkpoints of every family, written the way transformers writes them, with a tokenizer of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
    YoutuConfig,
)

WORDS = "the lead of billing is Mara and she works in Bergen while Jonas keeps a parrot at home near the harbor".split()
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}

FAMILY_CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama-gqa": (LlamaConfig, {}),
    "llama-mha-tied-bias": (
        LlamaConfig,
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": (
        LlamaConfig,
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-yarn": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral-window": (MistralConfig, {"sliding_window": 24, "head_dim": 16}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3-mqa": (Qwen3Config, {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
}

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
OTHER_CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3-moe": (Qwen3MoeConfig, {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen2-moe": (Qwen2MoeConfig, {**MOE, "shared_expert_intermediate_size": 48}),
    "olmo": (OlmoConfig, {}),
    "starcoder2": (Starcoder2Config, {}),
    "deepseek": (
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "youtu": (
        YoutuConfig,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3n": (
        Gemma3nTextConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": 24,
            "num_kv_shared_layers": 3,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 320,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 6,
            "sliding_window": 24,
            "num_kv_shared_layers": 3,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 320,
            "use_double_wide_mlp": True,
        },
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 2}),
}
"""With experts, with LayerNorms, with layers of different shapes, on transformers' own layers: for tests that ask for
them."""


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer with ChatML-like control tokens, one of them (`<tool_call>`) not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "cacheblend_prompt.txt").write_text(
        "Documents:\n\n{chunks}\n\nQuestion: {question}\n"
    )  # contexts are small here


def tokenizer_with_template(path: Path, template: str) -> Any:
    """Write the tokenizer with another chat template, and return our Tokenizer of it."""
    from cacheblend_cli.model.tokenizer import Tokenizer as OwnTokenizer

    path.mkdir(exist_ok=True)
    write_tokenizer(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return OwnTokenizer(path)


def write_checkpoint(path: Path, family: str, seed: int = 0, **overrides: Any) -> Any:
    """Write a random checkpoint and return transformers' model (fp32, eval).

    Every weight is drawn, norms and biases too.
    """
    path.mkdir(parents=True, exist_ok=True)
    cls, extra = (FAMILY_CONFIGS | OTHER_CONFIGS)[family]
    torch.manual_seed(seed)
    config = cls(**{**BASE, **extra, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * 0.12)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    write_tokenizer(path)
    return model
