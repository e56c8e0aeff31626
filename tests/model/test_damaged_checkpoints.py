"""Checkpoints that are not whole, or not what their config.json says: each is refused with what is wrong and what to
do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from cacheblend_cli.errors import CacheBlendError, UsageError
from cacheblend_cli.model import tokenizer
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.loading import load_model

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


def fifo(name: str) -> Callable[[Path], None]:
    """A FIFO in the place of a file: whoever opens it waits for a writer that never comes."""

    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return damage


def link(name: str, target: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return damage


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
         "model.safetensors")  # fmt: skip
HUGE = (2**31, 10**12, 2**63)


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
        *((fifo(name), f"{name} is not a regular file") for name in FILES),
        *((link(name, "/dev/zero"), f"{name} is not a regular file") for name in FILES),
        *((link(name, "."), f"{name} is not a regular file") for name in FILES),
        *((text(name, DEEP), "config.json is nested too deeply") for name in ("config.json", "tokenizer_config.json")),
        (text("tokenizer.json", DEEP), "tokenizer.json is not a readable tokenizer"),
        (
            text("config.json", "{}" + " " * (16 << 20)),
            "config.json is larger than 16,777,216 bytes, the limit for such a file",
        ),
        *(
            (config(**{name: value}), f"{name} in config.json is {value}")
            for name in (
                "num_hidden_layers",
                "hidden_size",
                "vocab_size",
                "intermediate_size",
                "num_attention_heads",
                "head_dim",
            )
            for value in HUGE
        ),
        *((config(max_position_embeddings=value), "max_position_embeddings") for value in HUGE),
        (config(num_hidden_layers=4097), "num_hidden_layers in config.json is 4097"),
        # numbers within the limits, and beyond what the file holds
        (config(num_hidden_layers=4096, layer_types=None), "num_layers 4,096"),
        (config(hidden_size=2**31 - 8), "hidden_size 2,147,483,640"),
        (config(vocab_size=2**31 - 1), "vocab_size 2,147,483,647"),
        (config(intermediate_size=2**31 - 1), "intermediate_size 2,147,483,647"),
        (config(num_attention_heads=2**16, head_dim=2**16), "num_heads 65,536"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    path = tmp_path / "m"
    write_checkpoint(path, "qwen2-window")
    load_model(path, "m", torch.device("cpu"), Precision("float32"), "torch")
    damage(path)
    with pytest.raises(CacheBlendError) as refused:
        load_model(path, "m", torch.device("cpu"), Precision("float32"), "torch")
    assert told in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code in (2, 3)


def test_a_config_alone_is_refused_too(tmp_path: Path) -> None:
    """`models show` and `models pull` read no weights."""
    path = tmp_path / "m"
    write_checkpoint(path, "qwen2-window")
    assert read_spec(path).num_layers == 4
    config(num_hidden_layers=4096, layer_types=None)(path)
    with pytest.raises(UsageError, match=r"num_layers 4,096, .* but its weights have [\d,]+ bytes"):
        read_spec(path)
    (path / "model.safetensors").unlink()
    assert read_spec(path).num_layers == 4096  # it may not be fetched yet
    config(num_hidden_layers=10**6)(path)
    with pytest.raises(UsageError, match=r"num_hidden_layers in config\.json is 1000000"):
        read_spec(path)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_local_experts": 2**31 - 1}, "experts in each of 4 layers"),
        ({"num_local_experts": 2**15 + 1}, "32,769 experts in each of 4 layers"),
        ({"moe_intermediate_size": 2**31 - 1}, "but its weights have"),
    ],
)
def test_experts_beyond_what_the_weights_hold(tmp_path: Path, values: dict[str, int], told: str) -> None:
    write_checkpoint(tmp_path, "qwen3-moe")
    read_spec(tmp_path)
    config(**values)(tmp_path)
    with pytest.raises(UsageError, match=told):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json is 1000000000"),
        ({"hidden_size": 2**63}, "hidden_size in config.json is 9223372036854775808"),
        ({"vocab_size": 2**31 - 1}, "vocab_size 2,147,483,647"),
        ({"intermediate_size": 2**31 - 1}, "intermediate_size 2,147,483,647"),
    ],
)
def test_a_config_that_transformers_reads(tmp_path: Path, values: dict[str, int], told: str) -> None:
    write_checkpoint(tmp_path, "olmo")
    assert read_spec(tmp_path).generic
    config(**values)(tmp_path)
    with pytest.raises(UsageError, match=told):
        read_spec(tmp_path)


def test_experts_of_a_tensor_without_elements_are_not_counted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3-moe")
    empty = "model.layers.0.mlp.experts.gate_up_proj"
    weights(lambda t: t.update({empty: torch.zeros(10**15, 0, 1)}))(tmp_path)
    with pytest.raises(UsageError, match=f"unexpected tensor {empty}"):
        load_model(tmp_path, "m", torch.device("cpu"), Precision("float32"), "torch")


def test_a_large_tokenizer_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen2-window")
    monkeypatch.setattr(tokenizer, "LARGE_BYTES", 1000)
    with pytest.raises(UsageError, match=r"tokenizer\.json is larger than 1,000 bytes, the limit for such a file"):
        tokenizer.Tokenizer(tmp_path)
