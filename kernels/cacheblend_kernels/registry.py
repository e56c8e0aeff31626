"""Which backends there are, and which one a device gets."""

from __future__ import annotations

import torch

from cacheblend_kernels.interface import KernelBackend, KernelError

BACKENDS = ("torch", "triton", "xformers")


def select_backend(name: str, device: torch.device) -> KernelBackend:
    """The backend of that name for the device; `auto` takes Triton on CUDA and torch elsewhere.

    Raises KernelError naming what is missing when the backend cannot run on the device.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        from cacheblend_kernels.torch_backend import TorchBackend

        return TorchBackend()
    if name not in BACKENDS:
        raise KernelError(f"unknown attention backend {name!r}", f"known: auto, {', '.join(BACKENDS)}")
    if device.type != "cuda":
        raise KernelError(
            f"the {name} backend needs a CUDA device, and this run is on {device.type}",
            "use --attention-backend torch, or --device cuda on a machine with an NVIDIA GPU",
        )
    if name == "triton":
        from cacheblend_kernels.triton_backend.backend import TritonBackend

        return TritonBackend()
    from cacheblend_kernels.xformers_backend import XformersBackend

    return XformersBackend()
