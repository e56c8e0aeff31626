"""Models by their hub id: what is fetched, in which order, and what is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_models import HubModel, index_alone, other_weights, stale_index
from hub_server import ID, Hub
from huggingface_hub import snapshot_download

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import CacheBlendError, NotFoundError
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.model.locate import resolve_model

SMALL = {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_one_file_of_weights_is_fetched_and_nothing_beside_it(hub: Hub) -> None:
    HubModel("m", change=other_weights("consolidated.safetensors", "model_ema.safetensors")).write(hub.repository)
    stale_index(hub.repository)
    for other in ("original/params.json", "onnx/config.json", "README.md", "trainer_state.json", "pytorch_model.bin"):
        (hub.repository / other).parent.mkdir(exist_ok=True)
        (hub.repository / other).write_text("{}")
    (hub.repository / "original" / "model.safetensors").write_bytes(b"")
    path = resolve_model(ID)
    assert hub.names() == SMALL | {"model.safetensors.index.json", "model.safetensors"}
    assert load_model(path, ID, torch.device("cpu"), Precision("float32"), "torch").spec.num_layers == 3


def test_shards_are_fetched_when_there_is_no_single_file(hub: Hub) -> None:
    HubModel("m", shard_size="20KB", change=None).write(hub.repository)
    (hub.repository / "model-00001-of-00009.safetensors").write_bytes(b"of another state of the model")
    shards = set(json.loads((hub.repository / "model.safetensors.index.json").read_text())["weight_map"].values())
    path = resolve_model(ID)
    assert len(shards) > 1
    assert hub.names() == SMALL | {"model.safetensors.index.json"} | shards
    assert load_model(path, ID, torch.device("cpu"), Precision("float32"), "torch").spec.num_layers == 3


def test_what_is_cached_is_not_asked_for_again(hub: Hub) -> None:
    HubModel("m").write(hub.repository)
    first = resolve_model(ID)
    shutil.rmtree(hub.repository)
    assert resolve_model(ID) == first


@pytest.mark.parametrize("kept", ["config.json", "model.safetensors"])
def test_a_cache_that_holds_some_of_the_files_is_completed(hub: Hub, kept: str) -> None:
    """Another tool has read the configuration alone, or a download was interrupted."""
    HubModel("m").write(hub.repository)
    snapshot_download(ID, allow_patterns=[kept])
    path = resolve_model(ID)
    assert load_model(path, ID, torch.device("cpu"), Precision("float32"), "torch").spec.num_layers == 3


def test_a_model_that_is_refused_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    HubModel("m", edit={"quantization_config": {"quant_method": "hqq"}}).write(hub.repository)
    with pytest.raises(CacheBlendError, match="hqq"):
        resolve_model(ID)
    assert "model.safetensors" not in hub.names()


def test_an_index_whose_shards_are_not_there_is_told(hub: Hub) -> None:
    HubModel("m", change=index_alone).write(hub.repository)
    (hub.repository / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match="model-00001-of-00002"):
        load_model(resolve_model(ID), ID, torch.device("cpu"), Precision("float32"), "torch")


def test_an_adapter_beside_the_weights_is_told_to_be_left_out(tmp_path: Path) -> None:
    HubModel("m", change=other_weights("adapter_model.safetensors")).write(tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    told: list[str] = []
    Engine.load(EngineConfig(model=str(tmp_path / "m")), notice=told.append)
    assert [line for line in told if "adapter_config.json" in line and "not applied" in line] == told
    assert told
