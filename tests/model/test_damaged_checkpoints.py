"""Checkpoints that are not whole, or not what their config.json says: each is refused with what is wrong and what to
do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.loading import Precision, load_model

NORM, EXTRA = "model.norm.weight", "model.layers.9.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def weights(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return damage


def config(**values: Any) -> Callable[[Path], None]:
    """Fields of config.json; None takes one away."""

    def damage(path: Path) -> None:
        fields = json.loads((path / "config.json").read_text()) | values
        (path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))

    return damage


def index(text: str) -> Callable[[Path], None]:
    """An index in the place of model.safetensors."""

    def damage(path: Path) -> None:
        (path / "model.safetensors").rename(path / "m.safetensors")
        (path / "model.safetensors.index.json").write_text(text)

    return damage


def text(name: str, content: str) -> Callable[[Path], None]:
    """Another file; surrogates are bytes that are no UTF-8."""
    return lambda path: (path / name).write_bytes(content.encode(errors="surrogateescape")) and None


def cut(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (weights(lambda t: t.pop(NORM)), NORM),
        (weights(lambda t: t.update({EXTRA: torch.zeros(2, 2)})), EXTRA),
        (weights(lambda t: t.update({NORM: torch.zeros(63)})), "[63]"),
        (cut, "model.safetensors"),
        (
            lambda path: (path / "model.safetensors").unlink(),
            "model.safetensors.index.json",
        ),
        (index('{"weight_map": {"a": "more.safetensors"}}'), "more.safetensors"),
        (index('{"weight_map": {"a": "../m/m.safetensors"}}'), "names files outside its directory"),
        (index('{"weight_map": ["a"]}'), "is not a valid index"),
        (index('{"weight_map": {"a": ["b"]}}'), "is not a valid index"),
        (index('{"weight_map": {"a": 1}}'), "is not a valid index"),
        (weights(lambda t: t.update({NORM.removeprefix("model."): t[NORM].clone()})), NORM),
        (text("generation_config.json", "[2]"), "generation_config.json"),
        (text("tokenizer_config.json", "[]"), "tokenizer_config.json"),
        (text("tokenizer_config.json", '{"chat_template": 3}'), "chat_template"),
        (text("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 3}]}'), "chat_template"),
        (text("special_tokens_map.json", "[1]"), "special_tokens_map.json"),
        (text("tokenizer_config.json", "\udcff"), "tokenizer_config.json"),
        (text("chat_template.jinja", "\udcff"), "chat_template.jinja"),
        (text("tokenizer.json", "\udcff"), "tokenizer.json"),
        (text("tokenizer.json", "{}"), "is not a readable tokenizer"),
        (text("generation_config.json", '{"eos_token_id": "</s>"}'), "eos_token_id"),
        (text("config.json", "[]"), "holds no JSON object"),
        (text("config.json", "{"), "is not valid JSON"),
        (config(layer_types=["full_attention"] * 3), "layer_types in config.json: 3"),
        (config(layer_types=["chunked_attention"] * 4), "layer_types in config.json: ['chunked_attention']"),
        (config(rope_parameters={"rope_type": "mrope"}), "'mrope'"),
        (config(rope_parameters={"rope_type": "yarn"}), "'yarn'"),
        (config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (config(hidden_act="relu"), "'relu'"),
        (config(num_key_value_heads=3), "3 KV heads"),
        (config(intermediate_size=None), "'intermediate_size'"),
    ],
)
def test_it_is_refused_with_what_is_wrong(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    path = tmp_path / "m"
    write_checkpoint(path, "qwen2-window")
    load_model(path, "m", torch.device("cpu"), Precision("float32"), "torch")
    damage(path)
    with pytest.raises(CacheBlendError) as refused:
        load_model(path, "m", torch.device("cpu"), Precision("float32"), "torch")
    assert told in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code in (2, 3)
