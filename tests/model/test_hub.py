"""Models of the hub, over HTTP: what is fetched, that it goes on where it stopped, and what is said when it cannot
be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import write_checkpoint
from command_line import process
from gguf_files import write_gguf
from hub_models import HubModel
from hub_server import BYTES, COMMIT, ID, Hub, serving

from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.hub import HubName, cached, fetch
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.on_disk import models_on_disk


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


@pytest.fixture
def ggufs(hub: Hub, tmp_path: Path) -> Hub:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    for kind in ("Q8_0", "F16"):
        write_gguf(tmp_path / "m", hub.repository / f"m-{kind}.gguf", "llama", kind)
    (hub.repository / "mmproj-m.gguf").write_bytes(b"GGUF")
    (hub.repository / "config.json").write_text("{}")  # some repositories of GGUF files have one
    hub.architecture = "llama"
    return hub


@pytest.mark.parametrize(
    ("tag", "kind"), [(":m-F16.gguf", "F16"), (":f16", "F16"), (":Q8_0", "Q8_0"), ("", "Q8_0"), ("@v1", "Q8_0")]
)
def test_one_gguf_file_is_fetched_and_found_again_without_the_hub(
    ggufs: Hub, monkeypatch: pytest.MonkeyPatch, tag: str, kind: str
) -> None:
    name = HubName.parse(ID + tag)
    assert cached(name) is None
    path = fetch(name)
    assert ggufs.fetched == [(f"m-{kind}.gguf", 0)]
    assert path.read_bytes() == (ggufs.repository / f"m-{kind}.gguf").read_bytes()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cached(name) == path
    assert (f"{name.repository}:m-{kind}.gguf", path) in models_on_disk(Path("/nowhere"))
    assert (resolve_model(name.text) / "config.json").is_file()


def test_without_a_quantisation_the_hub_decides_which_file(ggufs: Hub) -> None:
    other = fetch(HubName.parse(f"{ID}:F16"))
    assert cached(HubName.parse(ID)) is None, "not the file that happens to be there"
    path = fetch(HubName.parse(ID))
    assert (path.name, other.name) == ("m-Q8_0.gguf", "m-F16.gguf")
    assert cached(HubName.parse(ID)) == path


def test_a_gguf_file_with_an_architecture_that_is_not_read_is_not_fetched(ggufs: Hub) -> None:
    ggufs.architecture = "mamba"
    with pytest.raises(CacheBlendError, match="mamba"):
        fetch(HubName.parse(ID))
    assert not ggufs.fetched


@pytest.mark.parametrize(("added", "first"), [(0, 20 * BYTES), (1 << 20, 0)])
def test_an_interrupted_file_is_continued_by_the_next_run(ggufs: Hub, tmp_path: Path, added: int, first: int) -> None:
    name = HubName.parse(f"{ID}:Q8_0")
    ggufs.sent = {"m-Q8_0.gguf": 20 * BYTES}
    with pytest.raises(CacheBlendError, match=ID):
        fetch(name)
    with next(tmp_path.rglob("*.part")).open("ab") as part:
        part.write(bytes(added))  # more than the file has
    ggufs.sent = {}
    ggufs.fetched.clear()
    path = fetch(name)
    assert ggufs.fetched == [("m-Q8_0.gguf", first)]
    assert path.read_bytes() == (ggufs.repository / "m-Q8_0.gguf").read_bytes()


@pytest.mark.parametrize("file", ["m-Q8_0.gguf", "model.safetensors"])
def test_a_damaged_file_is_refused_and_removed(ggufs: Hub, tmp_path: Path, file: str) -> None:
    if file == "model.safetensors":
        write_checkpoint(ggufs.repository, "qwen3")
    name = HubName.parse(f"{ID}:{file}" if file.endswith(".gguf") else ID)
    ggufs.damaged = file
    with pytest.raises(CacheBlendError, match="SHA-256") as refused:
        fetch(name)
    assert (refused.value.exit_code, cached(name)) == (3, None)
    ggufs.damaged = None
    assert fetch(name) == cached(name)


def test_the_token_goes_to_the_hub_alone(ggufs: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving(ggufs.repository) as other:
        ggufs.files_at = other
        fetch(HubName.parse(f"{ID}:Q8_0"))
    assert other.fetched == [("m-Q8_0.gguf", 0)]
    assert (ggufs.tokens - {None}, other.tokens) == ({"Bearer hf_secret"}, {None})


def test_a_file_that_does_not_fit_the_disk_is_not_begun(ggufs: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10 * BYTES))
    with pytest.raises(CacheBlendError, match=r"m-Q8_0.gguf needs .* free"):
        fetch(HubName.parse(f"{ID}:Q8_0"))
    assert not ggufs.fetched


def test_the_hub_of_the_environment_is_asked_once(ggufs: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, as huggingface_hub reads the environment when it is imported."""
    for name, value in {"HF_ENDPOINT": ggufs.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    pulled = process("models", "pull", f"hf.co/{ID}:q8_0")
    assert (pulled.code, ggufs.names()) == (0, {"m-Q8_0.gguf"}), pulled.err
    assert pulled.out == f"{tmp_path}/home/hub/models--someone--some-model/snapshots/{COMMIT}/m-Q8_0.gguf\n"
    find = f"from cacheblend_cli.model.locate import locate; print(locate('{ID}:Q8_0'))"
    found = process(code=f"{find}; sys.exit('httpx2' in sys.modules)")
    assert (found.code, found.out) == (0, pulled.out), found.err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("someone/other-model", "someone/other-model"),
        (f"{ID}@v9", "v9"),
        (f"{ID}:Q4_K_M", "Q4_K_M"),
        ("qwen2.5:1.5b", "qwen2.5:1.5b"),
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
