"""Available kernel backends, and the choice for a device."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import torch

from cacheblend_kernels.interface import KernelBackend, KernelError
from cacheblend_kernels.torch_backend import TorchBackend

BACKENDS = ("torch", "triton", "xformers")
_MODULES = {"triton": "cacheblend_kernels.triton_backend.backend", "xformers": "cacheblend_kernels.xformers_backend"}
_CLASSES = {"triton": "TritonBackend", "xformers": "XformersBackend"}


def select_backend(name: str, device: torch.device) -> KernelBackend:
    """Return the backend with this name for the device. `auto`: triton on a GPU that supports it, otherwise torch.
    Raises KernelError if there is no such backend or it cannot run here; the message names what is missing."""
    if name not in ("auto", *BACKENDS):
        raise KernelError(f"unknown attention backend {name!r}", f"known: auto, {', '.join(BACKENDS)}")
    if name == "auto":
        name = "torch" if device.type != "cuda" or fallback_reason(name, device) else "triton"
    return TorchBackend() if name == "torch" else _load(name, device)


def fallback_reason(name: str, device: torch.device) -> str | None:
    """Return why `auto` falls back to torch on a GPU, as a message for the user; None if it does not fall back."""
    if name != "auto" or device.type != "cuda":
        return None
    try:
        _load("triton", device)
    except KernelError as error:
        slower = f"attention on {device} runs on torch's operations, slower than the kernels made for GPUs"
        return f"{slower}: {error.message}" + (f"; {error.hint}" if error.hint else "")
    return None


def missing_for(device: torch.device, names: Iterable[str] = BACKENDS) -> dict[str, str | None]:
    """Return, per backend name, why it cannot run on the device; None if it can. Imports the backends' packages."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            select_backend(name, device)
            found[name] = None
        except KernelError as error:
            found[name] = error.message
    return found


def _load(name: str, device: torch.device) -> KernelBackend:
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise KernelError(
            f"the {name} backend needs {error.name or name}, which does not import: {error}",
            f"pip install {error.name or name}, or use --attention-backend torch",
        ) from error
    backend: KernelBackend = getattr(module, _CLASSES[name])(device)
    return backend
