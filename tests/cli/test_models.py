"""cacheblend models: what is on disk, what it is, and whether it computes what it should."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_families
import pytest
import torch
from adapters import write_adapter
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from quantised import gptq, write_quantised

from cacheblend_cli.model import decoder, named
from cacheblend_cli.model.hub import HubName


def test_models_are_listed_wherever_they_are(
    cli: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_cli.model.named.PACKAGE", "no-such-package")
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(hub), raising=False)
    snapshot = hub / "models--org--m" / "snapshots" / ("a" * 40)
    shutil.copytree(model, snapshot)
    (hub / "models--org--m" / "refs").mkdir()
    (hub / "models--org--m" / "refs" / "main").write_text("a" * 40)
    folder = tmp_path / "models"
    write_checkpoint(folder / "plain", "llama-gqa")
    write_gguf(folder / "plain", folder / "m.gguf", "llama", "Q8_0")
    (folder / "mmproj-m.gguf").write_bytes(b"GGUF")
    shutil.copy(folder / "m.gguf", hub / "models--org--m" / "blob")
    (snapshot / "m-Q8_0.gguf").symlink_to(hub / "models--org--m" / "blob")
    monkeypatch.setenv("CACHEBLEND_MODEL", "org/m:q8_0")
    shutil.copytree(folder / "plain", folder / "part")
    (folder / "part" / "model.safetensors").unlink()
    found = {r["model"]: r for r in cli("models", "ls", "models", "--json").records}
    assert set(found) == {
        "handbook",
        "org/m",
        "org/m:m-Q8_0.gguf",
        "./models/plain",
        "./models/part",
        "./models/m.gguf",
    }
    assert [found[f"./models/{name}"]["kind"] for name in ("plain", "part")] == ["checkpoint", "incomplete"]
    assert found["./models/m.gguf"]["kind"] == "GGUF"
    assert found["./models/m.gguf"]["bytes"] == (folder / "m.gguf").stat().st_size
    assert "./models/m.gguf" in cli("models", "ls", "models").out
    assert [name for name, r in found.items() if r["default"]] == ["org/m:m-Q8_0.gguf"]
    assert cli("models", "show", "org/m:q8_0", "--json").records[0]["files"] == "m-Q8_0.gguf"


def test_a_model_is_pulled(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ollama = cli("models", "pull", "qwen2.5:1.5b")
    assert (ollama.code, "OWNER/NAME" in ollama.err) == (3, True)
    asked: list[str] = []

    def fetch(name: HubName) -> Path:
        asked.append(name.text)
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "model.safetensors").write_bytes(b"1234")
        return tmp_path / "m"

    monkeypatch.setattr("cacheblend_cli.model.hub.fetch", fetch)
    told = cli("models", "pull", "org/m")
    assert (told.code, told.out) == (0, f"{tmp_path}/m\n")
    assert "downloading org/m\n" in told.err
    record = cli("models", "pull", "org/m@v1:f.gguf", "--json", "-q").records[0]
    assert record == {"model": "org/m@v1:f.gguf", "path": f"{tmp_path}/m", "bytes": 4}
    assert asked == ["org/m", "org/m@v1:f.gguf"]
    assert cli("models", "pull", "a b").code == 3


def test_a_model_is_described(cli: Callable[..., Any], model: Path) -> None:
    told = cli("models", "show", str(model), "--json").records[0]
    assert (told["family"], told["layers"], told["context"], told["missing"]) == ("qwen2", 4, 1024, "nothing")
    assert told["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 4
    assert "layers            4" in cli("models", "show", str(model)).out
    assert cli("doctor", "--json").records[0]["model"]["kv_bytes_per_token"] == told["kv_bytes_per_token"]


@pytest.mark.default_codec
def test_kv_per_token_is_one_figure_with_its_codec(cli: Callable[..., Any], model: Path) -> None:
    show, doctor = cli("models", "show", str(model)).out, cli("doctor").out
    lines = [next(line for line in out.splitlines() if " stored (" in line) for out in (show, doctor)]
    assert lines[0].split() == ["kv", "per", "token", *lines[1].split()[1:]]
    assert "stored (int7)" in lines[0]
    assert "in memory (float32)" in lines[0]


def test_the_list_says_what_the_models_are(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_MODEL", "handbook")
    out = cli("models", "ls").out
    assert "the default; bundled, 1.1 M parameters, for trying" in out
    defaults = [r["model"] for r in cli("models", "ls", "--json").records if r["default"]]
    assert defaults == ["handbook"]


def test_the_first_command_that_chose_the_model_by_default_says_so_on_a_terminal(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CACHEBLEND_MODEL")
    monkeypatch.setattr(named, "default_model", lambda: "handbook")
    monkeypatch.setattr("cacheblend_cli.engine.runtime.default_model", lambda: "handbook")
    (tmp_path / "a.md").write_text("Mara leads billing.\n")
    command = ("precompute", "a.md", "--dry-run")
    assert named.FALLBACK_NOTE not in cli(*command).err, "not in a pipe"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for flags in (("--json",), ("-q",), ("--model", "handbook")):
        assert named.FALLBACK_NOTE not in cli(*command, *flags).err
    assert cli(*command).err.count(named.FALLBACK_NOTE) == 1
    assert named.FALLBACK_NOTE not in cli(*command).err
    assert named.FALLBACK_NOTE not in cli("doctor").err


def test_what_is_missing_or_not_implemented_is_named(cli: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in cli("models", "show", "m").out
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": "mamba", "architectures": None}))
    refused = cli("models", "show", "m")
    assert (refused.code, "mamba" in refused.err) == (2, True)


def test_a_model_that_is_computed_rightly_passes(cli: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    record = cli("models", "check", str(model), "--json").records[0]
    assert record["passed"]
    assert 0 < record["transformers"] <= record["limit"]
    write_gguf(model, tmp_path / "m.gguf", "qwen2", "Q8_0")
    told = cli("models", "check", "./m.gguf")
    assert (told.code, "passed: rounding" in told.out, "transformers" in told.out) == (0, True, False)
    assert "the ratio was not measured" in told.err
    assert record["profile"] is None


def test_a_quantised_model_is_described_and_passes(cli: Callable[..., Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen3", max_position_embeddings=1024)
    write_quantised(tmp_path / "m", gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32})
    assert cli("models", "show", "m", "--json").records[0]["quantised"] == "gptq"
    record = cli("models", "check", "m", "--json").records[0]
    assert record["passed"]
    assert 0 < record["transformers"] <= record["limit"]


@pytest.mark.parametrize("name", ["mistral-small-3", "gpt-oss, mxfp4"])
def test_what_transformers_has_a_way_of_its_own_for_passes(name: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """A language model inside another, and weights that it dequantises itself."""
    found = next(model for model in hub_families.RUN if model.name == name)
    replace(found, shape=found.shape | {"max_position_embeddings": 1024}).write(tmp_path / "m")
    record = cli("models", "check", "m", "--json").records[0]
    assert record["passed"]
    assert 0 < record["transformers"] <= record["limit"]


def test_a_model_with_an_adapter_is_described_and_passes(cli: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", model, ("q_proj", "v_proj"))
    told = cli("models", "show", str(model), "--lora", "lora", "--json").records[0]
    assert (told["adapter"], told["adapter_ranks"]) == ("lora", "4")
    assert told["adapter_weights"] > 1
    record = cli("models", "check", str(model), "--lora", "lora", "--json").records[0]
    assert record["passed"]
    write_checkpoint(tmp_path / "other", "llama-gqa", hidden_size=32)
    assert cli("models", "show", "other", "--lora", "lora").code == 2


def test_one_that_is_computed_wrongly_does_not(
    cli: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = decoder.Decoder.embed

    def wrong(self: decoder.Decoder, token_ids: torch.Tensor) -> torch.Tensor:
        return embed(self, token_ids) * 1.01 + 0.01

    monkeypatch.setattr(decoder.Decoder, "embed", wrong)
    told = cli("models", "check", str(model))
    assert (told.code, "FAILED" in told.out) == (1, True)
