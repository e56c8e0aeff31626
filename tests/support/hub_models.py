"""Configurations as models on the hub have them, in small, and the ones that are refused.

Each is written by transformers itself; then config.json is edited to what the hub's file looks like, and the files are
moved to where the hub has them. Both transformers and the engine read the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import write_tokenizer
from safetensors.torch import load_file, save_file
from text_tokenizers import write_text_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

Change = Callable[[Path], None]
DROP = object()
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class HubModel:
    """shape: of the config the checkpoint is written with; edit: fields of config.json afterwards, DROP takes one away.

    refused: what the message says of a model that is not loaded. has_weights: or nothing but its configuration.
    tokenizer: a kind of `text_tokenizers`, None for the one of `checkpoints`."""

    name: str
    config: Callable[..., PretrainedConfig] = LlamaConfig
    shape: dict[str, Any] = field(default_factory=dict)
    edit: dict[str, Any] = field(default_factory=dict)
    change: Change | None = None
    refused: str = ""
    has_weights: bool = True
    shard_size: str = "5GB"
    dtype: torch.dtype = torch.float32
    tokenizer: str | None = None
    template: str | None = None

    def write(self, path: Path, seed: int = 0) -> None:
        config = self.config(**(SHAPE | self.shape))
        if self.has_weights:
            self._write_weights(path, config, seed)
        else:
            names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            config.architectures = [names[config.model_type]]
            config.save_pretrained(path)
        if self.tokenizer is None:
            write_tokenizer(path)
        else:
            write_text_tokenizer(path, self.tokenizer, self.template)
        fields = json.loads((path / "config.json").read_text()) | self.edit
        (path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not DROP}))
        if self.change is not None:
            self.change(path)

    def _write_weights(self, path: Path, config: PretrainedConfig, seed: int) -> None:
        torch.manual_seed(seed)
        model = _auto(hasattr(config, "vision_config")).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(1 + 0.2 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * 0.15)
        model.to(self.dtype).save_pretrained(path, max_shard_size=self.shard_size)
        (path / "generation_config.json").unlink(missing_ok=True)


def load_reference(path: Path) -> Any:
    """transformers' model of a checkpoint, in float64."""
    sees = "vision_config" in json.loads((path / "config.json").read_text())
    return _auto(sees).from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()


def _auto(sees: bool) -> Any:
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def old(rope_theta: Any = DROP, **scaling: Any) -> dict[str, Any]:
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling."""
    return {"rope_parameters": DROP, "rope_theta": rope_theta, "rope_scaling": scaling or None, "torch_dtype": "float16",
            "dtype": DROP, "head_dim": DROP, "transformers_version": "4.38.2"}  # fmt: skip


def new(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0} | parameters}


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(path: Path) -> None:
        held = load_file(path / "model.safetensors")
        change(held)
        save_file(held, path / "model.safetensors", metadata={"format": "pt"})

    return apply


def unprefixed(held: dict[str, torch.Tensor]) -> None:
    for name in list(held):
        held[name.removeprefix("model.")] = held.pop(name)


def add(name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Change:
    return tensors(lambda held: held.update({name: make(held).contiguous()}))


def head_only(held: dict[str, torch.Tensor]) -> None:
    held["lm_head.weight"] = held.pop("model.embed_tokens.weight")


def other_weights(*names: str) -> Change:
    """Files of other weights beside model.safetensors."""

    def apply(path: Path) -> None:
        held = {name: t + 1 for name, t in load_file(path / "model.safetensors").items()}
        for name in names:
            save_file(held, path / name, metadata={"format": "pt"})

    return apply


def stale_index(path: Path) -> None:
    """An index and shards of an earlier state of the model."""
    held = {name: t + 1 for name, t in load_file(path / "model.safetensors").items()}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, shard in enumerate(shards):
        save_file({n: t for i, (n, t) in enumerate(held.items()) if i % 2 == number}, path / shard)
    index = {"weight_map": {name: shards[i % 2] for i, name in enumerate(held)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def index_alone(path: Path) -> None:
    stale_index(path)
    for shard in path.glob("model-0*"):
        shard.unlink()


def without_weights(*others: str) -> Change:
    """What else may lie in a directory without safetensors weights."""

    def apply(path: Path) -> None:
        (path / "model.safetensors").unlink()
        for name in others:
            (path / name).write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B", "peft_type": "LORA"}')

    return apply


def adapter_alone(path: Path) -> None:
    without_weights("adapter_config.json", "adapter_model.safetensors")(path)
    (path / "config.json").unlink()


LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 8.0]}
INTERLEAVED = ["sliding_attention", "full_attention", "sliding_attention"]
# as Mistral Small and Llama 3.x: a system prompt of its own, tools where there are some, a date that was set
SYSTEM = (
    "{{ bos_token }}[INST]{% if tools %}Tools: {{ tools | tojson }}{% endif %}{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}{% else %}You are an assistant. Today is {{ date_string | default('26 Jul 2024') }}.{% endif %}"
    "\n\n{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}</s>"
)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GENERATION_DUMP = {
    "output_attentions": False, "add_cross_attention": False, "is_decoder": False, "pruned_heads": {}, "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0, "num_beams": 1, "temperature": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "sep_token_id": None, "torchscript": False, "use_bfloat16": False, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
}  # fmt: skip

RUN = [
    # RoPE, as transformers 4 and 5 write it
    HubModel("llama-1: no RoPE fields", shape={"num_key_value_heads": 4},
             edit=old() | {"num_key_value_heads": DROP, "max_sequence_length": 2048, "rope_scaling": DROP}),
    HubModel("llama-2", shape={"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, edit=old() | {"pretraining_tp": 2}),
    HubModel("code-llama", edit=old(1000000)),
    HubModel("llama-3", edit=old(500000.0)),
    HubModel("llama-3.1", edit=old(500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                   original_max_position_embeddings=64)),
    HubModel("llama-3.2", shape={"tie_word_embeddings": True, "head_dim": 16},
             edit=old(500000.0, rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=32) | {"head_dim": 16}),
    HubModel("llama-3.1 new", edit=new("llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                       original_max_position_embeddings=64)),
    HubModel("vicuna-16k", edit=old(type="linear", factor=4.0) | {"max_position_embeddings": 64}),
    HubModel("deepseek-coder", edit=old(100000, type="linear", factor=4) | {"max_position_embeddings": 64}),
    HubModel("linear new", edit=new("linear", factor=4.0) | {"max_position_embeddings": 64}),
    HubModel("dynamic", edit=old(type="dynamic", factor=4.0) | {"max_position_embeddings": 64}),
    HubModel("dynamic new", edit=new("dynamic", factor=8.0) | {"max_position_embeddings": 64}),
    HubModel("dynamic, short prompt", edit=new("dynamic", factor=2.0)),
    HubModel("proportional", edit=new("proportional", partial_rotary_factor=0.5, factor=2.0)),
    HubModel("yarn-llama-2", edit=old(**YARN, finetuned=True) | {"max_position_embeddings": 256}),
    HubModel("yarn not yet in the length", edit=old(**YARN) | {"max_position_embeddings": 64}),
    HubModel("yarn new", edit=new("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0,
                                  attention_factor=1.2)),
    HubModel("yarn, two scales", edit=new("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7,
                                          mscale_all_dim=1.1)),
    HubModel("yarn, not truncated", edit=new("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)),
    HubModel("yarn, no original length", edit=old(type="yarn", factor=4.0) | {"max_position_embeddings": 64}),
    HubModel("yarn, null factor", edit=new("yarn", factor=None, original_max_position_embeddings=64)),
    HubModel("yarn, original length beside it", edit=old(**YARN) | {"original_max_position_embeddings": 48}),
    HubModel("longrope", edit=new("longrope", factor=4.0, original_max_position_embeddings=64, **LONG)),
    HubModel("longrope, short prompt", edit=new("longrope", original_max_position_embeddings=400, **LONG)),
    HubModel("longrope, original length beside it",
             edit=old(type="longrope", **LONG) | {"original_max_position_embeddings": 64}),
    HubModel("longrope, two original lengths",
             edit=old(type="longrope", **LONG, original_max_position_embeddings=400) | {"original_max_position_embeddings": 64}),
    HubModel("longrope, attention factor",
             edit=new("longrope", factor=2.0, attention_factor=1.5, original_max_position_embeddings=64, **LONG)),
    HubModel("recipe on a new config",
             edit=new("default", rope_theta=1e6) | {"rope_scaling": {**YARN, "rope_theta": 1e6}}),
    HubModel("recipe, theta beside it", edit=new("default", rope_theta=1e6) | {"rope_scaling": YARN, "rope_theta": 1e6}),
    HubModel("recipe, theta as ever", edit=new("default") | {"rope_scaling": YARN}),
    HubModel("empty rope_scaling", edit=new("default", rope_theta=5e5) | {"rope_scaling": {}}),
    # Shapes
    HubModel("biases", shape={"attention_bias": True, "mlp_bias": True}),
    HubModel("attention biases", shape={"attention_bias": True}),
    HubModel("wide heads", shape={"head_dim": 24}),
    HubModel("one KV head", shape={"num_key_value_heads": 1}),
    HubModel("gelu", shape={"hidden_act": "gelu"}),
    HubModel("gelu tanh", shape={"hidden_act": "gelu_pytorch_tanh"}),
    HubModel("gelu new", shape={"hidden_act": "gelu_new"}),
    HubModel("swish", shape={"hidden_act": "swish"}),
    HubModel("eps", shape={"rms_norm_eps": 0.1}),
    HubModel("large vocabulary", shape={"vocab_size": 1111}),
    HubModel("smollm", shape={"tie_word_embeddings": True},
             edit=old(10000.0) | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    HubModel("falcon-3", edit={"activation": "swiglu", "_attn_implementation_autoset": True}),
    HubModel("everything dumped", edit=old(10000.0) | GENERATION_DUMP),
    HubModel("Granite's fields, all off",
             edit={"residual_multiplier": 1.0, "logits_scaling": 1, "final_logit_softcapping": None, "layer_types": ["full_attention"] * 3}),
    HubModel("llamafied qwen", edit={"use_sliding_window": False, "sliding_window": 20, "max_window_layers": 2}),
    # Files
    HubModel("float16", dtype=torch.float16),
    HubModel("bfloat16", dtype=torch.bfloat16, shape={"tie_word_embeddings": True}),
    HubModel("float64", dtype=torch.float64),
    HubModel("sharded", shard_size="20KB"),
    HubModel("sharded and tied", shard_size="20KB", shape={"tie_word_embeddings": True}),
    HubModel("stale index and shards", change=stale_index),
    HubModel("index without its shards", change=index_alone),
    HubModel("ema beside", change=other_weights("model_ema.safetensors")),
    HubModel("all kinds beside", change=other_weights("consolidated.safetensors", "value_head.safetensors",
                                                      "adapter_model.safetensors")),
    HubModel("no architectures", edit={"architectures": DROP}),
    HubModel("no model_type", edit={"architectures": ["LlamaForCausalLM"]}),
    HubModel("embedding model", shape={"tie_word_embeddings": True}, edit={"architectures": ["LlamaModel"]},
             change=tensors(unprefixed)),
    HubModel("tied, only the head", shape={"tie_word_embeddings": True}, change=tensors(head_only)),
    HubModel("tied, the same head", shape={"tie_word_embeddings": True},
             change=add("lm_head.weight", lambda held: held["model.embed_tokens.weight"].clone())),
    HubModel("tied, another head", shape={"tie_word_embeddings": True},
             change=add("lm_head.weight", lambda held: held["model.embed_tokens.weight"].flip(0))),
    HubModel("value head inside", change=add("v_head.summary.weight", lambda held: torch.ones(1, 32))),
    HubModel("stored frequencies", change=add("model.layers.0.self_attn.rotary_emb.inv_freq", lambda held: torch.ones(4))),
    # Mistral
    HubModel("mistral-0.1", MistralConfig, {"sliding_window": 24}, old(10000.0)),
    HubModel("mistral-0.2", MistralConfig, {"sliding_window": None}, old(1000000.0)),
    HubModel("mistral, no window field", MistralConfig, {}, old(1000000.0) | {"sliding_window": DROP}),
    HubModel("mistral, narrow window", MistralConfig, {"sliding_window": 10}),
    HubModel("mistral-nemo", MistralConfig, {"sliding_window": None, "head_dim": 16}, old(1000000.0) | {"head_dim": 16}),
    HubModel("mistral, no KV head field", MistralConfig, {"num_attention_heads": 8, "num_key_value_heads": 8},
             {"num_key_value_heads": DROP}),
    HubModel("llama, null KV heads", LlamaConfig, {"num_key_value_heads": 4}, {"num_key_value_heads": None}),
    HubModel("yarn-mistral", MistralConfig, {"sliding_window": 40}, old(**YARN)),
    HubModel("ministral as mistral", MistralConfig, {"sliding_window": 16}, {"layer_types": INTERLEAVED}),
    HubModel("ministral", MinistralConfig, {"sliding_window": 16, "layer_types": INTERLEAVED, "head_dim": 8}),
    HubModel("ministral, no layer_types", MinistralConfig, {"sliding_window": 16, "head_dim": 8}, {"layer_types": DROP}),
    HubModel("ministral, null layer_types", MinistralConfig, {"sliding_window": 16, "head_dim": 8}, {"layer_types": None}),
    HubModel("e5-mistral", MistralConfig, {"tie_word_embeddings": True, "sliding_window": 32},
             {"architectures": ["MistralModel"]}, tensors(unprefixed)),
    # Qwen2 and Qwen3
    HubModel("qwen2", Qwen2Config, {}, old(1000000.0) | {"layer_types": DROP, "use_sliding_window": False, "sliding_window": 20}),
    HubModel("qwen2.5-0.5b", Qwen2Config, {"tie_word_embeddings": True}, old(1000000.0) | {"use_mrope": False}),
    HubModel("qwen2, later windows", Qwen2Config,
             {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, {"layer_types": DROP}),
    HubModel("qwen2, all windows", Qwen2Config,
             {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}, {"layer_types": DROP}),
    HubModel("qwen2, windows by name", Qwen2Config,
             {"use_sliding_window": True, "sliding_window": 20, "layer_types": INTERLEAVED}),
    HubModel("qwen2.5 recipe", Qwen2Config, {}, old(1000000.0, **YARN) | {"max_position_embeddings": 64}),
    HubModel("qwen2, head_dim", Qwen2Config, {"head_dim": 16}, {"head_dim": 16}),
    HubModel("qwen3", Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}, old(1000000.0) | {"head_dim": 16}),
    HubModel("qwen3, no head_dim field", Qwen3Config, {}, {"head_dim": DROP}),
    HubModel("qwen3, biases", Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    HubModel("qwen3 recipe", Qwen3Config, {"head_dim": 8},
             {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    HubModel("qwen3, windows", Qwen3Config,
             {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}, {"layer_types": DROP}),
    HubModel("qwen3, one KV head", Qwen3Config, {"head_dim": 16, "num_key_value_heads": 1}, shard_size="20KB"),
    HubModel("qwen3-embedding", Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}, change=tensors(unprefixed),
             dtype=torch.bfloat16),
    # Tokenizers and templates
    HubModel("tinyllama's tokenizer", shape={"vocab_size": 800}, tokenizer="llama2-legacy", template=SYSTEM),
    HubModel("llama-2's tokenizer, new", shape={"vocab_size": 800}, tokenizer="metaspace-first", template=SYSTEM),
    HubModel("mistral's tokenizer", MistralConfig, {"vocab_size": 800}, tokenizer="metaspace-always", template=SYSTEM),
    HubModel("gemma's tokenizer", shape={"vocab_size": 800}, tokenizer="gemma", template=SYSTEM),
    HubModel("byte-level tokenizer", Qwen2Config, {"vocab_size": 800}, tokenizer="byte-level", template=SYSTEM),
]  # fmt: skip


def config_fault(name: str, told: str, config: type[PretrainedConfig] = LlamaConfig, **edit: Any) -> HubModel:
    return HubModel(name, config, {}, edit, refused=told, has_weights=False)


REFUSED = [
    # Families and their fields
    HubModel("granite as llama", GraniteConfig, {"attention_multiplier": 0.1, "residual_multiplier": 0.3},
             {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, refused="_multiplier = 0."),
    HubModel("granite that names Llama's class", GraniteConfig, {}, {"architectures": ["LlamaForCausalLM"]},
             refused="LlamaForCausalLM of model_type 'granite'"),
    HubModel("smollm3 that names Llama's class", SmolLM3Config, {}, {"architectures": ["LlamaForCausalLM"]},
             refused="LlamaForCausalLM of model_type 'smollm3'"),
    HubModel("smollm3 as llama", SmolLM3Config, {"no_rope_layers": [1, 0, 1]},
             {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, refused="no_rope_layer"),
    config_fault("ministral 4", "unknown model_type 'ministral4'", model_type="ministral4"),
    config_fault("no type", "unknown model_type None", model_type=DROP),
    config_fault("classifier", "unknown architecture LlamaForSequenceClassification",
                 architectures=["LlamaForSequenceClassification"]),
    config_fault("two families", "unknown architecture MistralForCausalLM of model_type 'llama'",
                 architectures=["MistralForCausalLM"]),
    config_fault("its own code", "auto_map", auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"}),
    config_fault("logits_scaling", "logits_scaling = 8.0", logits_scaling=8.0),
    config_fault("attention_multiplier", "attention_multiplier = 0.0156", attention_multiplier=0.0156),
    config_fault("soft cap", "final_logit_softcapping = 30.0", Qwen2Config, final_logit_softcapping=30.0),
    config_fault("attention's soft cap", "attn_logit_softcapping", Qwen3Config, attn_logit_softcapping=50.0),
    config_fault("no_rope_layers", "no_rope_layers", no_rope_layers=[1, 1, 0]),
    config_fault("condensed RoPE", "rope_condense_ratio = 8", rope_condense_ratio=8),
    config_fault("experts", "num_local_experts = 8", MistralConfig, num_local_experts=8),
    config_fault("bidirectional", "is_causal = false", Qwen2Config, is_causal=False),
    config_fault("layers of their own", "per_layer_config", per_layer_config={"1": {"head_dim": 16}}),
    config_fault("llama with a window", "sliding_window = 64", sliding_window=64),
    config_fault("mistral with biases", "attention_bias = true", MistralConfig, attention_bias=True),
    config_fault("qwen2 with biases in the MLP", "mlp_bias = true", Qwen2Config, mlp_bias=True),
    config_fault("layers with names of their own", "layer_types", layer_types=["full_attention", "mamba", "mamba"]),
    config_fault("window without a size", "sliding_window", Qwen2Config, layer_types=INTERLEAVED),
    config_fault("another file", "transformers_weights", transformers_weights="other.safetensors"),
    # Quantised, and other formats
    config_fault("bitnet online", "quantization_config (bitnet)", quantization_config={"quant_method": "bitnet",
                 "linear_class": "autobitlinear", "quantization_mode": "online"}),
    *(config_fault(method, f"quantization_config ({method})", quantization_config={"quant_method": method, "bits": 4})
      for method in ("modelopt", "hqq", "torchao")),
    config_fault("mlx", "quantised: config.json has quantization ({'group_size': 64, 'bits': 4})",
                 quantization={"group_size": 64, "bits": 4}),
    HubModel("gptq tensors, config silent", change=add("model.layers.0.mlp.up_proj.qweight", lambda held: torch.ones(4, 4)),
             refused="unexpected tensor model.layers.0.mlp.up_proj.qweight"),
    HubModel("int8 weights, config silent", refused="stored as I8",
             change=tensors(lambda held: held.update({"model.norm.weight": held["model.norm.weight"].to(torch.int8)}))),
    HubModel("adapter", change=adapter_alone, refused="LoRA adapter (adapter_config.json) of meta-llama/Llama-3.1-8B"),
    HubModel("adapter beside a config", change=without_weights("adapter_config.json"), refused="LoRA adapter"),
    HubModel("torch weights", change=without_weights("pytorch_model.bin"), refused="PyTorch weights (pytorch_model.bin)"),
    HubModel("mistral's own format", change=without_weights("consolidated.safetensors"), refused="consolidated.safetensors"),
    # RoPE
    config_fault("part of the head", "partial_rotary_factor", partial_rotary_factor=0.5),
    config_fault("part of the head, new", "partial_rotary_factor", **new("default", partial_rotary_factor=0.25)),
    config_fault("RoPE by kind of layer", "full_attention", Qwen3Config, rope_parameters={
                 "full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}),
    config_fault("mrope", "unknown RoPE type 'mrope'", Qwen2Config, **new("mrope", mrope_section=[2, 2, 4])),
    config_fault("mrope_section", "mrope_section", Qwen2Config, **new("default", mrope_section=[2, 2, 4])),
    config_fault("longrope with scales", "short_mscale", **new("longrope", short_mscale=1.2, **LONG)),
    config_fault("llama 4's scaling", "llama_4_scaling_beta", MistralConfig,
                 **new("yarn", factor=4.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.1)),
    config_fault("yarn without a factor", "type 'yarn' are incomplete: they lack factor", **new("yarn")),
    config_fault("linear with a null factor", "they lack factor", **new("linear", factor=None)),
    config_fault("llama3 without its bounds", "they lack low_freq_factor, high_freq_factor", **new("llama3", factor=8.0)),
    # Nulls, lists and the like
    config_fault("theta null", "rope_theta in config.json is null", rope_parameters=DROP, rope_theta=None),
    config_fault("theta null, new", "rope_theta in config.json is null", **new("default", rope_theta=None)),
    config_fault("theta as text", "rope_theta in config.json is '1e6'", **new("default", rope_theta="1e6")),
    config_fault("factor of nothing", "factor in config.json is 0", **new("linear", factor=0)),
    config_fault("factors of another head", "short_factor in config.json", **new("longrope", short_factor=[1.0], long_factor=[1.0])),
    config_fault("eps null", "rms_norm_eps in config.json is null", rms_norm_eps=None),
    config_fault("eps as text", "rms_norm_eps in config.json is '1e-5'", rms_norm_eps="1e-5"),
    config_fault("rope_scaling a list", "rope_scaling in config.json is ['linear', 2]", rope_scaling=["linear", 2]),
    config_fault("rope_parameters text", "rope_parameters in config.json is 'default'", rope_parameters="default"),
    config_fault("rope_type a list", "unknown RoPE type ['yarn']", rope_scaling={"rope_type": ["yarn"], "factor": 2.0}),
    config_fault("window a list", "sliding_window in config.json is [4096]", MistralConfig, sliding_window=[4096]),
    config_fault("window of none", "sliding_window in config.json is 0", MistralConfig, sliding_window=0),
    config_fault("layers null", "num_hidden_layers in config.json is null", num_hidden_layers=None),
    config_fault("heads missing", "config.json lacks 'num_attention_heads'", num_attention_heads=DROP),
    config_fault("size as text", "hidden_size in config.json is '32'", hidden_size="32"),
    config_fault("size negative", "vocab_size in config.json is -1", vocab_size=-1),
    config_fault("length null", "max_position_embeddings in config.json is null", max_position_embeddings=None),
    config_fault("bias as text", "attention_bias in config.json is 'no'", attention_bias="no"),
    config_fault("odd head", "head_dim in config.json is 7", head_dim=7),
    config_fault("activation a list", "unknown activation ['silu']", hidden_act=["silu"]),
    config_fault("architectures as text", "architectures in config.json", architectures="LlamaForCausalLM"),
    config_fault("model_type a list", "unknown model_type ['llama']", model_type=["llama"]),
    config_fault("layer_types as text", "layer_types in config.json", Qwen2Config, layer_types="full_attention"),
    config_fault("too few layer types", "layer_types in config.json: 1", Qwen2Config, layer_types=["full_attention"]),
]  # fmt: skip
