"""Fields of config.json that no family implements: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.quantisation import FIELD, read_quantisation, refused
from cacheblend_cli.model.families.reader import Family
from cacheblend_cli.model.families.values import shown
from cacheblend_cli.model.families.wrappers import Wrapper

HYBRIDS = {
    "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM", "nemotron_h": "NemotronHForCausalLM", "olmo_hybrid": "OlmoHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM",
}  # fmt: skip
"""Models some of whose layers keep a recurrent state in place of K and V, with their class in transformers."""

OTHER_QUANTISATION = ("compression_config", "quantization")  # older compressed-tensors, MLX

# Fields that change the computation in any family, each with the values that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "use_rope": (None, True),
    "is_encoder_decoder": (None, False),
    "per_layer_config": (None,),
    "transformers_weights": (None,),
    "moe_layer_freq": (None, 1),
}
# Parts of the names of fields that change a forward pass in some family of transformers (a test compares them with all
# of its config classes), or in models that bring their own code. Fields known to a family are not checked here.
CHANGES = (
    "multiplier", "scal", "softcap", "soft_cap", "clip_qkv", "mup",  # values are scaled or cut
    "rope", "rotary", "alibi", "position_embedding", "window", "sliding", "chunk", "long_context",  # positions
    "attn", "attention", "qk_", "sink", "causal", "bidirectional", "prefix_lm", "kv_shared", "multi_query", "lora_rank",
    # other parts of a layer
    "head_dim", "bias", "norm", "residual", "mlp", "swiglu", "sparsity", "layer_types", "per_layer",
    "expert", "moe", "router", "mamba", "ssm", "conv",  # other layers
)  # fmt: skip
KEEPS = (  # exceptions: fields of training, generation, the runtime, and epsilons of norms
    "dropout", "pdrop", "loss", "initializer", "renormalize", "sequence_bias", "guidance_scale", "prefill_chunk_size",
    "output_router_logits", "implementation", "flash", "_eps", "epsilon",
)  # fmt: skip
SCALES = ("multiplier", "scal", "factor", "ratio", "pct")  # 1 changes nothing


def check_weights(config: dict[str, Any], architectures: Collection[str] = ()) -> None:
    """Raise UsageError for a checkpoint with unsupported quantisation, or one that needs its own code.

    architectures: classes of transformers implemented for its model_type. Many models on the hub name the file that
    such a class came from; like transformers without trust_remote_code, we use the class instead.
    """
    read_quantisation(config.get(FIELD))
    for name in OTHER_QUANTISATION:
        if config.get(name):
            raise refused(name, config[name], "which is not implemented")
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return
    for name in auto_map.keys() & {"AutoModel", "AutoModelForCausalLM"}:
        if str(auto_map[name]).rpartition(".")[2] not in architectures:
            raise UsageError(
                f"the model needs its own code: auto_map in config.json names {shown(auto_map[name])}, and such code is never run",
                "take auto_map out of config.json, if the model computes what its model_type does without it",
            )


def refuse_what_is_not_implemented(config: dict[str, Any], family: Family | Wrapper) -> None:
    """Raise UsageError for a field that the family does not know and whose value changes the forward pass."""
    for name, value in config.items():
        if family.knows(name) or name.startswith("_") or not changes(name, value):
            continue
        if name == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        raise UsageError(
            f"config.json has {name} = {shown(value)}, which changes what the model computes and is not implemented for "
            f"model_type {family.model_type!r}",
            "use another model; or take the field out of config.json, if the model was made without it",
        )


def changes(name: str, value: Any) -> bool:
    """Return whether an unknown field has a value that changes the forward pass."""
    if name in REFUSED:
        return value not in REFUSED[name]
    if not any(part in name for part in CHANGES) or any(part in name for part in KEEPS):
        return False
    if value in (None, False, 0, "", [], {}) or (value == 1 and any(part in name for part in SCALES)):
        return False
    return not (
        name == "layer_types" and isinstance(value, list) and set(map(str, value)) <= {"full_attention", "attention"}
    )
