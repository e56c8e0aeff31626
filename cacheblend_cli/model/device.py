"""Device names, and checking that a model fits a device."""

from __future__ import annotations

import torch

from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.weight_map import num_parameters

_DEVICES = "known: auto, cpu, cuda, cuda:N, mps"


def resolve_device(name: str) -> torch.device:
    """Resolve a device name. `auto` takes CUDA if available, never MPS, which is untried. Returns CUDA devices with an
    index. Raises DeviceError, UsageError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}", _DEVICES) from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"unsupported device {name!r}", _DEVICES)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("this machine or this torch build has no MPS, Apple's GPU interface", "use --device cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("this machine or this torch build has no CUDA", "use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{device} does not exist", f"this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def make_current(device: torch.device) -> None:
    """Make this the calling thread's current device, for streams, events and graphs created without a device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def check_room(spec: ModelSpec, dtype: torch.dtype, device: torch.device, free: int) -> None:
    """Raise DeviceError if the weights alone exceed the GPU's free bytes, before anything is copied."""
    if spec.generic:
        return  # transformers determines the weights
    needed = dtype.itemsize * num_parameters(spec)
    if needed > free:
        most = free // dtype.itemsize
        raise DeviceError(
            f"the weights take {gib(needed)} in {_name(dtype)}; {gib(free)} are free on {device}",
            f"up to about {most / 1e9:.1f} billion parameters would fit: use a smaller model, end what else uses the GPU, "
            "or use --device cpu",
        )


def check_host_room(needed: int, dtype: torch.dtype, available: int | None) -> None:
    """Raise DeviceError if the weights that are copied exceed the host's available bytes, before the system kills the
    process. available: None if unknown."""
    if available is not None and needed > available:
        raise DeviceError(
            f"the weights take {gib(needed)} in {_name(dtype)}; {gib(available)} of memory are available",
            "use a smaller model, or a GGUF file, which stays in its file; or end other programs",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
