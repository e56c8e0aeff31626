"""A model that is described without its weights is the one that is loaded: the same keys, sizes and windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_families
import hub_generic
import hub_models
import pytest
from adapters import write_adapter
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from hub_models import HubModel

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.unloaded import UnloadedEngine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.description import DTYPES


def unloaded(**settings: Any) -> UnloadedEngine | None:
    config = EngineConfig(**{"device": "cpu", **settings})
    return UnloadedEngine.of(config, lambda: Engine.load(config), lambda text: None)


def check(engine: UnloadedEngine | None) -> None:
    assert engine is not None
    own, loaded = engine.prompts, engine.loaded.prompts
    assert own.model.spec == loaded.model.spec
    for field in ("name", "path", "dtype", "fingerprint", "fingerprints", "identity", "lora_digest", "weight_dtype"):
        assert getattr(own.model, field) == getattr(loaded.model, field), field
    of, there = own.collection(), loaded.collection()
    assert (of.id, of.prefix_key, of.codec, of.window(4096)) == (
        there.id,
        there.prefix_key,
        there.codec,
        there.window(4096),
    )
    assert of.blob_sizes(40) == there.blob_sizes(40)
    assert [o.id for o in of.in_other_dtypes()] == [o.id for o in there.in_other_dtypes()]


LENGTH_DEPENDENT = [m for m in hub_models.RUN if m.name in ("dynamic", "longrope")]
BY_CLASS = {m.config.__qualname__: m for m in reversed((*hub_models.RUN, *hub_families.RUN)) if m.change is None}


@pytest.mark.parametrize("model", [*BY_CLASS.values(), *LENGTH_DEPENDENT], ids=lambda model: model.name)
def test_families(model: HubModel, tmp_path: Path) -> None:
    model.write(tmp_path / "m")
    check(unloaded(model=str(tmp_path / "m")))


def adapted(folder: Path) -> dict[str, Any]:
    write_adapter(folder / "lora", folder / "m", ["q_proj", "v_proj"])
    return {"lora": str(folder / "lora")}


def in_gguf(folder: Path) -> dict[str, Any]:
    write_gguf(folder / "m", folder / "m.gguf", "qwen2", "Q8_0")
    return {"model": str(folder / "m.gguf")}


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{name: lambda folder, name=name: {"dtype": name} for name in DTYPES},  # type: ignore[misc]
    "int8": lambda folder: {"weight_dtype": "int8"},
    "adapter": adapted,
    "GGUF": in_gguf,
    "prompt": lambda folder: {"system": "Be brief.", "prompt": "{chunks} {question}"},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_ways_to_load(way: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2", hidden_size=64, intermediate_size=64)
    settings = {"model": str(tmp_path / "m"), **way(tmp_path)}
    check(unloaded(**settings))
    check(unloaded(**settings))  # as remembered


def test_models_that_are_known_only_when_they_are_loaded(tmp_path: Path) -> None:
    hub_generic.RUN[0].write(tmp_path / "generic")
    assert unloaded(model=str(tmp_path / "generic")) is None
    assert unloaded(model="handbook", tensor_parallel=2) is None
    assert unloaded(model="handbook", device="cuda") is None


def test_a_model_that_is_replaced_before_it_is_loaded_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2", seed=1)
    engine = unloaded(model=str(tmp_path / "m"))
    assert engine is not None
    write_checkpoint(tmp_path / "m", "qwen2", seed=2)
    with pytest.raises(UsageError, match="changed"):
        _ = engine.loaded


def test_nothing_is_stored_for_a_file_of_weights_that_was_cut_off(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (tmp_path / "a.txt").write_text("Mara leads billing.")
    engine = unloaded(model=str(tmp_path / "m"))
    assert engine is not None
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        with pytest.raises(UsageError, match="not a readable"):
            engine.precompute(store, [str(tmp_path / "a.txt")], PrecomputeOptions(chunk_tokens=64), print)
        assert not list(store.chunks())
