"""Fields of config.json that a family reads, compared with transformers' config classes: none is ignored."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from transformers import GenerationConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cacheblend_cli.model.families import FAMILIES, spec_from_config
from cacheblend_cli.model.families.reader import OTHER_FIELDS, SHAPE_FIELDS
from cacheblend_cli.model.families.refusals import REFUSED, changes
from cacheblend_cli.model.spec import ModelSpec

LEFT_OVER = {  # what no config class of transformers has as a field any more, and configs still have
    "llama": {"max_window_layers"}, "mistral": {"max_window_layers"}, "ministral": {"max_window_layers"},
    "gemma3n_text": {"rope_local_base_freq", "query_pre_attn_scalar", "altup_lr_multiplier"},
    "gemma3_text": {"sliding_window_pattern", "rope_local_base_freq"}, "cohere2": {"sliding_window_pattern"},
    "smollm3": {"max_window_layers", "pretraining_tp"}, "gpt_oss": {"experts_per_token"}, "qwen3_moe": {"max_window_layers", "num_local_experts"},
    "gemma4_text": {"global_head_dim", "num_global_key_value_heads", "per_layer_config"},
    "gemma4_unified_text": {"vocab_size_per_layer_input", "global_head_dim", "num_global_key_value_heads", "per_layer_config"},
    "minicpm3": {"qk_head_dim"}, "youtu": {"qk_head_dim"},
    "deepseek_v2": {"qk_head_dim", "scoring_func", "moe_layer_freq", "num_nextn_predict_layers"},
    "deepseek_v3": {"qk_head_dim", "scoring_func", "moe_layer_freq", "topk_method", "num_nextn_predict_layers"},
    "glm4_moe_lite": {"qk_head_dim", "scoring_func", "moe_layer_freq", "topk_method", "num_nextn_predict_layers", "first_k_dense_replace"},
}  # fmt: skip
SIZES = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 48,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
}


def fields_of(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_transformers_is_known_and_none_is_made_up(name: str) -> None:
    family, theirs = FAMILIES[name], fields_of(CONFIG_MAPPING[name])
    unknown = theirs - {*family.fields, *SHAPE_FIELDS, *OTHER_FIELDS}
    assert all(field in REFUSED or changes(field, [0.3]) for field in unknown), "read over"
    assert set(family.fields) - LEFT_OVER.get(name, set()) <= theirs
    older = {"rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "torch_dtype"}
    base = fields_of(LlamaConfig) | older | {"model_type", "output_attentions"}
    assert {*SHAPE_FIELDS, *OTHER_FIELDS} <= base


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_unified_text"])
def test_a_missing_field_of_gemma_4_is_what_transformers_takes_for_it(name: str) -> None:
    config, spec = CONFIG_MAPPING[name](), spec_from_config({"model_type": name})
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    assert [spec.heads_of(i) for i in range(spec.num_layers)] == [(c.num_key_value_heads, c.head_dim) for c in layers]
    inputs = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    assert (spec.token_width, spec.token_vocab) == tuple(getattr(config, field, 0) for field in inputs)
    assert spec.max_context == config.max_position_embeddings
    assert set(spec.sliding_windows) == {None, config.sliding_window}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.sliding_windows]
    assert kinds == config.layer_types
    assert ropes_of(spec) == {kind: whole(rope) for kind, rope in config.rope_parameters.items()}
    assert (spec.num_heads, spec.hidden_size, spec.intermediate_size) == (
        8,
        config.hidden_size,
        config.intermediate_size,
    )


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")


@pytest.mark.parametrize("name", LATENT)
def test_a_config_of_latent_attention_is_read_as_by_transformers(name: str) -> None:
    required = {"num_experts_per_tok": 6} if name == "deepseek_v2" else {}  # null there, and of no use
    config = CONFIG_MAPPING[name](**required)
    spec = spec_from_config(config.to_diff_dict())
    latent = spec.latent
    assert latent is not None
    theirs = (
        config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        config.rms_norm_eps, config.tie_word_embeddings, config.max_position_embeddings, config.kv_lora_rank,
        config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.q_lora_rank, config.rope_parameters,
        getattr(config, "rope_interleave", name == "deepseek_v2"),
    )  # fmt: skip
    ours = (
        spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.num_heads,
        spec.rms_norm_eps, spec.tied, spec.max_context, latent.rank,
        latent.nope_dim, spec.head_dim, latent.value_dim, latent.query_rank, spec.rope, spec.interleaved,
    )  # fmt: skip
    assert ours == theirs
    experts = spec.experts
    if experts is None:
        assert not hasattr(config, "n_routed_experts")
        return
    routing = experts.routing
    assert routing is not None
    kinds = getattr(config, "mlp_layer_types", None)
    sparse = (
        [i for i, kind in enumerate(kinds) if kind == "sparse"]
        if kinds
        else range(config.first_k_dense_replace, spec.num_layers)
    )
    assert list(experts.layers) == list(sparse)
    assert (experts.count, experts.per_token, experts.width, experts.shared_width, experts.normed, routing.factor) == (
        config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size,
        config.moe_intermediate_size * config.n_shared_experts, config.norm_topk_prob, config.routed_scaling_factor,
    )  # fmt: skip
    assert (routing.groups, routing.groups_kept) == (config.n_group or 1, config.topk_group or 1)


@pytest.mark.parametrize("name", LATENT)
def test_a_config_of_latent_attention_without_an_epsilon_has_transformers_own(name: str) -> None:
    config = CONFIG_MAPPING[name](**({"num_experts_per_tok": 6} if name == "deepseek_v2" else {}))
    given = {field: value for field, value in config.to_dict().items() if field != "rms_norm_eps"}
    assert spec_from_config(given).rms_norm_eps == CONFIG_MAPPING[name].from_dict(given).rms_norm_eps


def test_minicpm3_without_its_factors_has_none() -> None:
    null = {"scale_depth": None, "dim_model_base": None, "scale_emb": 1}
    spec = spec_from_config(CONFIG_MAPPING["minicpm3"]().to_diff_dict() | null)
    assert (spec.residual_scale, spec.logit_scale, spec.embedding_scale) == (1, 1, 1)


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in (*LATENT, "gemma4_text", "gemma4_unified_text")]
)
def test_a_missing_field_is_what_transformers_takes_for_it(name: str) -> None:
    config = CONFIG_MAPPING[name](**SIZES)
    spec = spec_from_config({"model_type": name, **SIZES})
    eps = next(getattr(config, n) for n in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon") if hasattr(config, n))
    theirs = (
        config.num_key_value_heads, getattr(config, "head_dim", None) or 16,
        getattr(config, "hidden_act", None) or config.hidden_activation, eps, getattr(config, "tie_word_embeddings", False),
        config.max_position_embeddings, getattr(config, "logit_scale", 1.0),
    )  # fmt: skip
    ours = (
        spec.num_kv_heads, spec.head_dim, spec.activation, spec.rms_norm_eps, spec.tied, spec.max_position_embeddings,
        spec.logit_scale,
    )  # fmt: skip
    assert ours == theirs
    assert ropes_of(spec) == {kind: whole(rope) for kind, rope in by_kind(config.rope_parameters).items()}
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 40
    assert spec.sliding_windows == tuple(window if kind == "sliding_attention" else None for kind in types)


def by_kind(rope: dict[str, Any]) -> dict[str, Any]:
    return rope if "full_attention" in rope else {"full_attention": rope}


def whole(rope: dict[str, Any]) -> dict[str, Any]:
    """Without the part of the head, where it is all of it, and what stands there twice."""
    twice = ("type", "max_position_embeddings")
    return {k: v for k, v in rope.items() if (k, v) != ("partial_rotary_factor", 1.0) and k not in twice}


def ropes_of(spec: ModelSpec) -> dict[str, Any]:
    local = {} if spec.local_rope is None else {"sliding_attention": spec.local_rope}
    return {"full_attention": spec.rope} | local


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_switched_on_window_has_transformers_size_and_layers(name: str) -> None:
    config = CONFIG_MAPPING[name](**SIZES, use_sliding_window=True)
    spec = spec_from_config({"model_type": name, "use_sliding_window": True, **SIZES})
    assert spec.sliding_windows == (None,) * 28 + (4096,) * 12
    assert [w is not None for w in spec.sliding_windows] == [t == "sliding_attention" for t in config.layer_types]
    assert config.sliding_window == 4096


# Fields of other decoders with RoPE that stop no Llama. They are for training, generation and pictures, name what a
# Llama names otherwise, or are sizes of parts that a Llama's weights have not: those of such a model do not load.
HARMLESS = set(
    """
    H_cycles L_bp_cycles L_cycles activation activation_function adapter_rank altup_active_idx altup_coef_clip
    altup_num_inputs audio_config audio_encoder_config audio_vocab_size aux_loss_coef block_auto_adjust_ff_dim
    block_multiple_of block_size block_types cca_time0 cca_time1 classifier_activation classifier_dropout
    cls_token_id compress_rates d_model decoder_config decoder_sparse_step dense_intermediate_size
    depth_decoder_config dim_model_base emb_pdrop embd_pdrop embedding_dropout embedding_initializer_range
    encoder_config encoder_hash_byte_group_nb_functions encoder_hash_byte_group_size encoder_hash_byte_group_vocab
    eod_token_id ffn_config ffn_dim ffn_hidden_size first_k_dense_replace gating global_config hc_count hc_eps
    hc_lowrank hc_magnitude hc_mult heads_per_ngram hidden_activation hidden_dropout index_block_size
    index_local_blocks index_n_heads index_topk index_topk_blocks indexer_budget indexer_compress_ratio
    indexer_kv_heads indexer_n_heads indexer_types initializer_cutoff_factor input_jitter_noise
    intermediate_multiple_size is_decoder kda_lower_bound kda_safe_gate kv_channels lambda_std_dev laurel_rank
    layer_group_size layer_norm_eps layer_norm_epsilon layers_block_type linear_a_log_max linear_a_log_min
    linear_allow_neg_eigval linear_dt_init_floor linear_dt_max linear_dt_min linear_num_key_heads
    linear_num_value_heads lru_width make_ngram_vocab_size_divisible_by max_patch_length max_seq_len mlp_dropout
    mtp_loss_scaling_factor n_group n_heads n_layers new_decoder_architecture ngram_size ngram_vocab_size_base
    norm_eps norm_epsilon num_codebooks num_dense_layers num_kv_heads num_layers num_layers_per_stack
    num_logits_to_keep num_mem_blocks num_mtp_layers num_nextn_predict_layers o_groups output_gate_type
    output_router_logits patch_in_forward patch_size patcher_config patching_batch_size patching_mode
    patching_threshold ple_embed_dim ple_layer_ids pooling resid_pdrop residual_dropout router_aux_loss_coef
    scoring_func seed sep_token_id shared_intermediate_size split_ngram_parts time_step_floor time_step_limit
    time_step_max time_step_min topk_group topk_method use_mem_eff_path vision_config z_loss_coefficient
    """.split()
)


def test_no_field_of_another_decoder_is_read_over() -> None:
    """What some decoder with RoPE has, with a value that would say something, stops a Llama, or is listed above."""
    missed = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        theirs = fields_of(CONFIG_MAPPING[name])
        if "rope_parameters" in theirs:
            missed |= {field for field in theirs if not FAMILIES["llama"].knows(field) and not changes(field, [0.3])}
    assert missed <= HARMLESS


def test_what_generation_is_told_stops_no_model() -> None:
    assert not {f for f in vars(GenerationConfig()) if not FAMILIES["llama"].knows(f) and changes(f, [0.3])}


@pytest.mark.parametrize(
    ("rope", "max_positions", "limit"),
    [
        ({"rope_type": "default", "factor": 4.0}, 4096, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "linear", "factor": 2.5}, 4097, 10242),
        ({"rope_type": "dynamic", "factor": 2}, 4096, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}, 131072, 65536),
        ({"rope_type": "yarn", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}, 16384, 16384),
        ({"rope_type": "longrope", "factor": 32.0, "short_factor": [1.0], "long_factor": [2.0]}, 131072, 131072),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192}, 131072, 131072,
        ),
    ],
)  # fmt: skip
def test_the_context_is_what_the_scaling_gives(rope: dict[str, Any], max_positions: int, limit: int) -> None:
    config = {"model_type": "llama", **SIZES, "hidden_size": 64, "rope_scaling": rope}
    assert spec_from_config(config | {"max_position_embeddings": max_positions}).max_context == limit


def test_what_a_family_reads_is_the_same_in_both_spellings() -> None:
    """A model keeps its fingerprint, and so its store, when its config.json is saved anew by transformers 5."""
    for name in FAMILIES:
        more = {"num_key_value_heads": 32} if name in LATENT else {}
        more |= {"num_experts_per_tok": 6} if name == "deepseek_v2" else {}
        config = CONFIG_MAPPING[name](**SIZES, max_position_embeddings=512, **more)
        new = spec_from_config(config.to_dict() | {"architectures": None})
        theta = by_kind(config.rope_parameters)["full_attention"]["rope_theta"]
        older = config.to_dict() | {"rope_parameters": None, "rope_theta": theta, "rope_scaling": None}
        assert shape(spec_from_config(older)) == shape(new)


def shape(spec: ModelSpec) -> dict[str, Any]:
    return {key: value for key, value in vars(spec).items() if key != "config"}


def imported(code: str) -> list[str]:
    """Which of torch and transformers a new process has imported after the code."""
    code += "; import sys; print(*[m for m in ('torch', 'transformers') if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_reading_a_config_imports_neither_torch_nor_transformers() -> None:
    assert imported("import cacheblend_cli.model.families") == []


def test_loading_a_model_with_scaled_rope_imports_no_transformers(tmp_path: Path) -> None:
    """It takes twice as long to import as such a model takes to load."""
    write_checkpoint(tmp_path, "llama3-rope")
    assert imported(
        f"from cacheblend_cli.engine.engine import *; Engine.load(EngineConfig(model={str(tmp_path)!r}))"
    ) == ["torch"]
