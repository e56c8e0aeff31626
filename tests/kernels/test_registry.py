"""The backend of a device, and messages if a backend cannot run."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from cacheblend_kernels import KernelBackend, KernelError, fallback_reason, registry, select_backend

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")


def test_auto_is_torch_on_a_cpu() -> None:
    assert select_backend("auto", CPU).name == "torch"


def test_auto_on_a_gpu_without_a_backend_is_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, device: torch.device) -> KernelBackend:
        raise KernelError(f"the {name} backend needs triton", "pip install triton")

    monkeypatch.setattr(registry, "_load", broken)
    gpu = torch.device("cuda:1")
    assert select_backend("auto", gpu).name == "torch"
    assert fallback_reason("auto", gpu) == (
        "attention on cuda:1 runs on torch's operations, slower than the kernels made for GPUs: "
        "the triton backend needs triton; pip install triton"
    )
    assert fallback_reason("torch", gpu) is None, "it was asked for"
    assert fallback_reason("auto", CPU) is None, "it is what a CPU has"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_auto_is_triton_on_a_gpu() -> None:
    assert select_backend("auto", torch.device("cuda")).name == "triton"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KernelError, match="flash") as error:
        select_backend("flash", CPU)
    assert error.value.hint == "known: auto, torch, triton, xformers"


@compiled
@pytest.mark.parametrize("name", ["triton", "xformers"])
def test_a_gpu_backend_on_a_cpu_says_so(name: str) -> None:
    for package in ("triton", name):  # xformers' backend is built on ours
        pytest.importorskip(package, reason=f"{package} is not installed")
    with pytest.raises(KernelError, match=name) as error:
        select_backend(name, CPU)
    assert error.value.hint == "use --attention-backend torch"


@pytest.mark.parametrize("package", ["triton", "xformers"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if package != "triton":
        pytest.importorskip("triton", reason="triton is not installed, and is named first")
    for module in [
        m for m in sys.modules if m.startswith(("cacheblend_kernels.triton", "cacheblend_kernels.xformers"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(KernelError, match=package) as error:
        select_backend(package, CPU)
    assert error.value.hint is not None
    assert package in error.value.hint
