"""LoRA adapters: the model with one computes what transformers computes with the merged weights; what is not understood
is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merge, write_adapter
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from hub_families import RUN
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.loading import LoadedModel, load_model
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

TOLERANCE = 1e-4
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"layers\.[23]\.mlp\.up_proj": 3},
    "alpha_pattern": {"down_proj": 4},
}


def load(path: Path, lora: Path | None = None) -> LoadedModel:
    return load_model(resolve_model(str(path)), "m", torch.device("cpu"), Precision("float32"), "torch", lora)


def logits_of(model: Path, lora: Path | None) -> tuple[torch.Tensor, list[int]]:
    """Of every position of a prompt, and the prompt's ids."""
    config = EngineConfig(model=str(model), lora=lora and str(lora), dtype="float32", block_size=16)
    engine = Engine.load(config)
    question = AskRequest("where does Mara work? " * 8, (), BlendParams(mode="full"), SamplingParams(max_tokens=2))
    done = prefill(
        engine.runtime,
        resolve(engine.runtime, None, question),
        output_positions=lambda plan: torch.arange(plan.num_tokens),
    )
    done.sequence.release()
    return done.result.logits, done.plan.token_ids


def of_transformers(model: Path, ids: list[int]) -> torch.Tensor:
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return theirs(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]


@pytest.mark.parametrize(
    ("family", "modules", "config", "scales"),
    [
        ("llama-gqa", ("q_proj", "v_proj"), {}, {"": 4.0}),
        ("qwen3", ALL, {"lora_alpha": 3}, {"": 0.75}),
        ("qwen2", ("k_proj", "down_proj"), {"use_rslora": True}, {"": 8.0}),
        ("mistral", (*ALL, "lm_head"), {"target_modules": "all-linear"}, {"": 4.0}),
        ("llama3-rope", ("o_proj",), {"target_modules": r".*\.self_attn\.o_proj"}, {"": 4.0}),
        ("llama-gqa", ALL, PATTERNS, {
            "layers.1.self_attn.q_proj": 8.0, "2.mlp.up_proj": 16 / 3, "3.mlp.up_proj": 16 / 3, "down_proj": 1.0, "": 4.0,
        }),
    ],
)  # fmt: skip
def test_a_model_with_an_adapter_is_transformers_with_the_merged_weights(
    family: str, modules: tuple[str, ...], config: dict[str, Any], scales: dict[str, float], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "m", family)
    ranks = {"layers.1.self_attn.q_proj": 2, "2.mlp.up_proj": 3, "3.mlp.up_proj": 3} if "rank_pattern" in config else {}
    pairs = write_adapter(tmp_path / "lora", tmp_path / "m", modules, ranks, **config)
    logits, ids = logits_of(tmp_path / "m", tmp_path / "lora")
    plain = of_transformers(tmp_path / "m", ids)
    merge(tmp_path / "m", pairs, scales)
    merged = of_transformers(tmp_path / "m", ids)
    assert (logits - merged).abs().max() <= TOLERANCE
    assert (plain - merged).abs().max() > 100 * TOLERANCE, "or this would prove little"


@pytest.mark.parametrize(
    ("name", "modules"),
    [("phi3", ("qkv_proj", "gate_up_proj")), ("glm4", ("q_proj", "k_proj")), ("granite", ("o_proj", "down_proj"))],
)
def test_it_is_merged_before_a_family_folds_anything_into_its_weights(
    name: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """Phi-3 has fused weights; GLM's heads are put in another order, Granite's weights are scaled."""
    next(model for model in RUN if model.config.__name__.lower() == f"{name}config").write(tmp_path / "m")
    pairs = write_adapter(tmp_path / "lora", tmp_path / "m", modules)
    logits, ids = logits_of(tmp_path / "m", tmp_path / "lora")
    merge(tmp_path / "m", pairs, {"": 4.0})
    assert (logits - of_transformers(tmp_path / "m", ids)).abs().max() <= TOLERANCE


@pytest.mark.usefixtures("float_products")
def test_it_is_merged_into_a_gguf_file_in_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows of q and k stand in another order than the adapter's."""
    monkeypatch.setattr("cacheblend_cli.model.gguf_files.tensors.GGUFTensors.block_bytes", 3000)  # 11 rows
    write_checkpoint(tmp_path / "m", "llama-gqa")
    pairs = write_adapter(tmp_path / "lora", tmp_path / "m", ALL)
    weights = write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "Q8_0")
    logits, ids = logits_of(tmp_path / "m.gguf", tmp_path / "lora")
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    merge(tmp_path / "m", pairs, {"": 4.0})
    assert (logits - of_transformers(tmp_path / "m", ids)).abs().max() <= TOLERANCE


def test_a_bare_model_takes_an_adapter_of_the_whole(tmp_path: Path) -> None:
    """Weights saved without `model.` before their names; adapters have it."""
    write_checkpoint(tmp_path / "m", "qwen2")
    held = load_file(tmp_path / "m" / "model.safetensors")
    held = {name.removeprefix("model."): t for name, t in held.items()}
    save_file(held, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    pairs = write_adapter(tmp_path / "lora", tmp_path / "m", ALL)
    assert len(pairs) == 28
    logits, _ = logits_of(tmp_path / "m", tmp_path / "lora")
    merge(tmp_path / "m", pairs, {"": 4.0})
    merged, _ = logits_of(tmp_path / "m", None)
    assert (logits - merged).abs().max() <= TOLERANCE


def test_what_is_added_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    model, first, second = tmp_path / "m", tmp_path / "1", tmp_path / "2"
    write_checkpoint(model, "llama-gqa")
    write_adapter(first, model, ("q_proj",))
    write_adapter(second, model, ("q_proj",), lora_alpha=8)
    third = shutil.copytree(first, tmp_path / "3")
    (third / "adapter_config.json").write_text(
        json.dumps(json.loads((first / "adapter_config.json").read_text()) | {"base_model_name_or_path": "n"})
    )
    prints = [load(model, lora).fingerprint for lora in (None, first, second, third)]
    assert len(set(prints)) == 3
    assert prints[1] == prints[3], "what a folder is called and who wrote it changes nothing"


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        held = load_file(folder / "adapter_model.safetensors")
        change(held)
        save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    return damage


def config(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        fields = json.loads((folder / "adapter_config.json").read_text()) | values
        (folder / "adapter_config.json").write_text(json.dumps(fields))

    return damage


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (config(peft_type="IA3"), "peft_type = 'IA3'"),
        (config(use_dora=True), "use_dora"),
        (config(bias="all"), "bias = 'all'"),
        (config(modules_to_save=["lm_head"]), "modules_to_save = ['lm_head']"),
        (config(init_lora_weights="pissa"), "init_lora_weights = 'pissa'"),
        (config(fan_in_fan_out=True), "fan_in_fan_out = true"),
        (config(layer_replication=[[0, 2]]), "layer_replication"),
        (config(target_parameters=["mlp.experts"]), "target_parameters"),
        (config(a_new_field=3), "a_new_field = 3"),
        (config(r=8), "gives rank 8"),
        (config(r=0), "r and lora_alpha of"),
        (config(lora_alpha="16"), "r and lora_alpha of"),
        (config(rank_pattern=[1]), "rank_pattern"),
        (config(rank_pattern={"(": 1}), "adapter_config.json"),
        (config(target_modules=["v_proj"]), "target_modules"),
        (config(target_modules=r".*\.v_proj"), "target_modules"),
        (config(target_modules="("), "target_modules"),
        (tensors(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(4)})), "lora_magnitude_vector"),
        (
            tensors(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)})),
            "embed_tokens",
        ),
        (tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), "lora_A.weight"),
        (tensors(dict.clear), "adapter_model.safetensors"),
        (
            tensors(lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(3, 4)})),
            "[3, 64]",
        ),
        (
            tensors(lambda t: t.update({n.replace("rs.0.", "rs.9."): v.clone() for n, v in t.items() if "rs.0." in n})),
            "layers.9.self_attn.q_proj",
        ),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "adapter_model.safetensors"),
        (
            lambda f: (f / "adapter_model.safetensors").unlink(),
            "adapter_model.safetensors",
        ),
        (shutil.rmtree, "adapter_config.json"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_adapter(tmp_path / "lora", tmp_path / "m", ("q_proj",))
    load(tmp_path / "m", tmp_path / "lora")
    damage(tmp_path / "lora")
    with pytest.raises(CacheBlendError) as refused:
        load(tmp_path / "m", tmp_path / "lora")
    assert told in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code in (2, 3)


def test_a_head_that_is_the_embedding_takes_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    write_adapter(tmp_path / "lora", tmp_path / "m", ("q_proj",), target_modules="all-linear")
    tensors(
        lambda t: t.update(
            {
                "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.ones(320, 4),
            }
        )
    )(tmp_path / "lora")
    with pytest.raises(CacheBlendError, match="lm_head"):
        load(tmp_path / "m", tmp_path / "lora")
