"""Models of the hub, over HTTP: what is fetched, that it goes on where it stopped, and what is said when it cannot
be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from hub_models import HubModel
from hub_server import COMMIT, ID, Hub, serving

from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.hub import HubName, cached, fetch
from cacheblend_cli.model.loading import resolve_model
from cacheblend_cli.model.on_disk import models_on_disk

BYTES = 1000  # that huggingface_hub writes at a time


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "repository").mkdir()
    with serving(tmp_path / "repository") as hub:
        constants = "huggingface_hub.constants."
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "DOWNLOAD_CHUNK_SIZE": BYTES,
        }.items():
            monkeypatch.setattr(constants + name, value)
        cache = str(tmp_path / "cache")
        monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", cache, raising=False)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the library tries again
        yield hub


@pytest.fixture
def checkpoint(hub: Hub) -> Hub:
    write_checkpoint(hub.repository, "qwen3")
    for other in ("README.md", "pytorch_model.bin", "onnx/config.json", "consolidated.safetensors"):
        (hub.repository / other).parent.mkdir(exist_ok=True)
        (hub.repository / other).write_text("{}")
    return hub


READ = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


@pytest.mark.parametrize("name", [ID, f"{ID}@v1", f"{ID}@{COMMIT}"])
def test_what_is_read_is_fetched_and_then_found(checkpoint: Hub, name: str) -> None:
    assert cached(HubName.parse(name)) is None
    path = fetch(HubName.parse(name))
    assert checkpoint.names() == READ
    assert (path / "model.safetensors").read_bytes() == (checkpoint.repository / "model.safetensors").read_bytes()
    checkpoint.fetched.clear()
    assert resolve_model(name) == path
    assert not checkpoint.fetched
    assert (name, path) in models_on_disk(Path("/nowhere"))


def test_a_connection_that_breaks_goes_on_where_it_broke(checkpoint: Hub) -> None:
    checkpoint.cut = {"model.safetensors": 300 * BYTES}
    path = fetch(HubName.parse(ID))
    assert [first for name, first in checkpoint.fetched if name == "model.safetensors"][:2] == [0, 300 * BYTES]
    assert (path / "model.safetensors").read_bytes() == (checkpoint.repository / "model.safetensors").read_bytes()


def test_what_was_fetched_before_it_failed_is_not_fetched_again(hub: Hub) -> None:
    HubModel("m", shard_size="20KB", change=None).write(hub.repository)
    last = max(hub.repository.glob("model-*.safetensors")).name
    hub.cut = {last: BYTES // 2}  # less than is written at a time: the library gives up
    with pytest.raises(CacheBlendError, match=ID) as told:
        fetch(HubName.parse(ID))
    assert told.value.hint
    assert cached(HubName.parse(ID)) is None
    hub.cut = {}
    before = hub.names()
    hub.fetched.clear()
    path = fetch(HubName.parse(ID))
    assert last in hub.names()
    assert len(hub.names()) < len(before)
    assert cached(HubName.parse(ID)) == path


def test_of_gguf_files_the_one_that_is_named_is_fetched(hub: Hub, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    for kind in ("Q8_0", "F16"):
        write_gguf(tmp_path / "m", hub.repository / f"m-{kind}.gguf", "llama", kind)
    (hub.repository / "mmproj-m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CacheBlendError) as told:
        fetch(HubName.parse(ID))
    assert f"{ID}:m-F16.gguf, {ID}:m-Q8_0.gguf" in told.value.hint
    assert not hub.fetched
    name = f"{ID}:m-Q8_0.gguf"
    path = fetch(HubName.parse(name))
    assert hub.names() == {"m-Q8_0.gguf"}
    assert (name, path) in models_on_disk(Path("/nowhere"))
    assert (resolve_model(name) / "config.json").is_file()
    assert len(hub.fetched) == 1
    with pytest.raises(CacheBlendError) as told:
        fetch(HubName.parse(f"{ID}:other.gguf"))
    assert ("other.gguf" in told.value.message, told.value.exit_code) == (True, 3)
    assert "huggingface.co/" in told.value.hint


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("someone/other-model", "someone/other-model"),
        (f"{ID}@v9", "v9"),
        (f"{ID}:m-00001-of-00002.gguf", "m-00001-of-00002.gguf"),
        ("a:b", "a:b"),
    ],
)
def test_missing_models_and_files_are_reported(checkpoint: Hub, name: str, told: str) -> None:
    with pytest.raises(CacheBlendError, match=told):
        resolve_model(name)
    assert not checkpoint.fetched


def test_a_model_that_is_given_to_some_is_told(checkpoint: Hub) -> None:
    checkpoint.gated = True
    with pytest.raises(CacheBlendError, match="accepted its terms"):
        fetch(HubName.parse(ID))


def test_a_missing_network_is_reported(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CacheBlendError, match="HF_HUB_OFFLINE"):
        fetch(HubName.parse(ID))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CacheBlendError, match=ID):
        fetch(HubName.parse(ID))
