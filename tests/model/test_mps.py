"""Apple's GPUs, without one: which devices are refused, and that every operation of an answer has a kernel for MPS in
torch's own list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_kernels import compiled, torch_attention
from checkpoints import write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.model import host_memory
from cacheblend_cli.model.device import resolve_device
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

ANY_DEVICE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("meta", "xpu", "hip"):
        with pytest.raises(UsageError):
            resolve_device(name)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError) as refused:
        resolve_device("mps")
    assert refused.value.exit_code == 5
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("mps") == torch.device("mps")
    assert resolve_device("auto").type != "mps"


def test_systems_that_do_not_tell_their_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", Path("/nonexistent"))
    assert host_memory.available_memory() is None
    runtime = Engine.load(EngineConfig("handbook", device="cpu")).runtime
    runtime.shared_memory(None, 1).pool.check_fits(runtime.context)


class Recorder(TorchDispatchMode):
    """Names of the operations that run, and those of them that see fp64, which MPS does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.wide = set[str](), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names.add(f"{name}.{func._overloadname}".removesuffix(".default"))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64 and result.numel() > 1:
            self.wide.add(name)
        return result


def kernels() -> dict[str, str]:
    """What dispatches each operation: its part of torch's list of native functions."""
    spec = find_spec("torchgen")
    folder = Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path("/nonexistent")
    file = folder / "packaged" / "ATen" / "native" / "native_functions.yaml"
    if not file.is_file():
        pytest.skip("torch comes without its list of native functions")
    parts = re.split(r"^- func: ", file.read_text(), flags=re.MULTILINE)[1:]
    return {part[: part.index("(")]: part for part in parts}


def missing_on_mps(names: set[str]) -> Iterator[str]:
    """Operations that have neither a kernel for MPS nor one for any device."""
    known = kernels()
    for name in sorted(names & known.keys()):
        part = known[name]
        delegate = re.search(r"structured_delegate: (\S+)", part)
        text = known[delegate[1]] if delegate else part
        keys = (
            re.findall(r"^ {4}([\w, ]+):", text[text.find("dispatch:") :], flags=re.MULTILINE)
            if "dispatch:" in text
            else []
        )
        held = {key for line in keys for key in line.split(", ")}
        if held and "MPS" not in held and held.isdisjoint(ANY_DEVICE):
            yield name


@pytest.mark.parametrize(
    "config",
    [BlendParams(), BlendParams(selector="hkvd", check_layer=1, correction="none"), BlendParams(mode="full")],
    ids=["query", "hkvd", "full"],
)
def test_every_operation_of_an_answer_runs_on_mps(
    config: BlendParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend_store import ChunkStore

    monkeypatch.setattr(compiled, "multiplies", lambda dtype: False)  # products of its own, on a CPU alone
    monkeypatch.setattr(torch_attention, "onednn_multiplies", lambda dtype: False)
    write_checkpoint(tmp_path / "tiny", "qwen2", max_position_embeddings=1024)
    (tmp_path / "docs").mkdir()
    for i in range(3):
        (tmp_path / "docs" / f"{i}.md").write_text(f"Mara {i} works in Bergen and leads billing. " * 8)
    engine = Engine.load(EngineConfig(model=str(tmp_path / "tiny"), dtype="float32", threads=1))
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        engine.precompute(store, [str(tmp_path / "docs")], PrecomputeOptions(chunk_tokens=40), lambda event: None)
        keys = [manifest.key for manifest in store.chunks()][:4]
        sampling = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, top_k=5, seed=1, repetition_penalty=1.1)
        with Recorder() as seen:
            engine.run_alone(store, AskRequest("who?", keys, config, sampling))
    assert len(seen.names) > 40
    assert (list(missing_on_mps(seen.names)), seen.wide) == ([], set())


def test_the_list_tells_what_mps_has_not() -> None:
    assert list(missing_on_mps({"geqrf", "mm", "add.Tensor", "linear"})) == ["geqrf"]
