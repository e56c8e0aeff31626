"""Quantised checkpoints: what is computed is what transformers computes with the dequantised weights; what is not read
is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from quantised import awq, by_row, gptq, in_blocks, in_one, write_quantised
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

TOLERANCE = 1e-4
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def compressed(strategy: str, kind: str, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        "actorder": None,
    } | weights
    group = {"weights": weights, "input_activations": {"num_bits": 8, "type": kind}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": f"{kind}-quantized",
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {},
    }  # fmt: skip


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 blocks": (in_blocks(24, 40, "weight_scale_inv"), FP8),
    "fp8 one scale": (lambda w: in_one(w), compressed("tensor", "float")),
    "fp8 rows": (by_row(E4M3), compressed("channel", "float")),
    "fp8 blocks, compressed": (in_blocks(16, 32), compressed("block", "float", block_structure=[16, 32])),
    "int8 rows": (by_row(INT8), compressed("channel", "int")),
    "int8 groups": (in_blocks(1, 16, kind=INT8), compressed("group", "int", group_size=16)),
    "gptq sym": (gptq(4, 32, sym=True), GPTQ),
    "gptq asym": (gptq(4, 16), GPTQ | {"group_size": 16, "sym": False}),
    "gptq in the order of activations": (gptq(4, 32, act_order=True), GPTQ | {"desc_act": True}),
    "gptq 8 bits, one group": (gptq(8, -1), GPTQ | {"bits": 8, "group_size": -1}),
    "gptq v2 that says v1": (gptq(4, 32, sym=True, zero_offset=0), GPTQ | {"checkpoint_format": "gptq"}),
    "gptq v2 without g_idx": (gptq(4, 32, zero_offset=0, g_idx=False), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "awq": (awq(32), AWQ),
}


def logits_of(model: Path) -> tuple[torch.Tensor, list[int]]:
    engine = Engine.load(EngineConfig(model=str(model), dtype="float32", block_size=16))
    question = AskRequest("where does Mara work? " * 8, (), BlendParams(mode="full"), SamplingParams(max_tokens=2))
    request = resolve(engine.runtime, None, question)
    done = prefill(engine.runtime, request, output_positions=lambda plan: torch.arange(plan.num_tokens))
    done.sequence.release()
    return done.result.logits, done.plan.token_ids


def of_transformers(model: Path, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((model / "config.json").read_text())
    fields.pop("quantization_config", None)
    (model / "config.json").write_text(json.dumps(fields))
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return theirs(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_it_is_transformers_with_the_dequantised_weights(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise, config = CASES[case]
    write_checkpoint(tmp_path / "m", "qwen3")
    original = load_file(tmp_path / "m" / "model.safetensors")
    weights = write_quantised(tmp_path / "m", quantise, config, plain=("layers.1.",))
    logits, ids = logits_of(tmp_path / "m")
    monkeypatch.setattr("cacheblend_cli.model.quantised.DequantisedTensors.block_bytes", 3000)  # 7 to 11 rows
    assert torch.equal(logits_of(tmp_path / "m")[0], logits), "read in parts"
    there = of_transformers(tmp_path / "m", weights, ids)
    assert (logits - there).abs().max() <= TOLERANCE
    unquantised = of_transformers(tmp_path / "m", original, ids)
    assert (there - unquantised).abs().max() > 10 * TOLERANCE, "or this would prove little"
    largest = max((weights[n] - w).abs().max() for n, w in original.items())
    assert largest < 0.2, "the test's own quantisation stays near the weights"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size = [128]"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        (compressed("channel", "int", num_bits=4), "num_bits = 4"),
        (compressed("channel", "int", actorder="group"), "actorder = 'group'"),
        (compressed("channel", "int") | {"format": "marlin-24"}, "format = 'marlin-24'"),
        (compressed("channel", "int", num_bits=3) | {"format": "pack-quantized"}, "num_bits = 3"),
        (compressed("channel", "int") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (compressed("channel", "int") | {"config_groups": {}}, "config_groups"),
        (compressed("group", "int", group_size=None), "group_size"),
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (GPTQ | {"group_size": 0}, "group_size = 0"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point = false"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    write_checkpoint(tmp_path / "m", "qwen3")
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    with pytest.raises(CacheBlendError) as refused:
        spec_from_config(fields | {"quantization_config": config})
    assert told in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == 2


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        (
            "int8 rows",
            lambda t: t.pop(f"{Q}.weight_scale"),
            f"{Q}.weight_scale ",
        ),
        ("int8 rows", lambda t: t.update({f"{Q}.weight_scale": torch.ones(5, 1)}), "[5, 1]"),
        ("fp8 blocks", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 2)}), "[2, 2]"),
        ("gptq asym", lambda t: t.pop(f"{Q}.qzeros"), f"{Q}.qzeros "),
        ("gptq asym", lambda t: t.pop(f"{Q}.qweight"), f"{Q}.qweight "),
        (
            "gptq in the order of activations",
            lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"] + 1}),
            "group 2",
        ),
        ("awq", lambda t: t.update({f"{Q}.scales": torch.ones(1, 8)}), "[1, 8]"),
        ("awq", lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}), "F32"),
    ],
)
def test_parts_that_do_not_fit_are_told(
    tmp_path: Path, case: str, change: Callable[[dict[str, torch.Tensor]], object], told: str
) -> None:
    quantise, config = CASES[case]
    write_checkpoint(tmp_path / "m", "qwen3")
    write_quantised(tmp_path / "m", quantise, config)
    held = load_file(tmp_path / "m" / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CacheBlendError) as refused:
        load_model(tmp_path / "m", "m", torch.device("cpu"), Precision("float32"), "torch")
    assert told in refused.value.message
    assert refused.value.hint


def test_biases_of_zeros_that_the_model_has_not_are_left_out(tmp_path: Path) -> None:
    """As AutoGPTQ writes them for every layer."""
    write_checkpoint(tmp_path / "m", "qwen3")
    write_quantised(tmp_path / "m", *CASES["gptq sym"])
    held = load_file(tmp_path / "m" / "model.safetensors")
    bias = f"{Q}.bias"
    save_file(held | {bias: torch.zeros(128)}, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    load_model(tmp_path / "m", "m", torch.device("cpu"), Precision("float32"), "torch")
    save_file(held | {bias: torch.ones(128)}, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CacheBlendError, match=bias):
        load_model(tmp_path / "m", "m", torch.device("cpu"), Precision("float32"), "torch")


def test_how_weights_are_read_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """The same files, whose zero points mean something else."""
    write_checkpoint(tmp_path / "m", "qwen3")
    write_quantised(tmp_path / "m", *CASES["gptq asym"])
    prints = set()
    for version in ("gptq", "gptq_v2"):
        fields = json.loads((tmp_path / "m" / "config.json").read_text())
        fields["quantization_config"]["checkpoint_format"] = version
        (tmp_path / "m" / "config.json").write_text(json.dumps(fields))
        prints.add(load_model(tmp_path / "m", "m", torch.device("cpu"), Precision("float32"), "torch").fingerprint)
    assert len(prints) == 2
