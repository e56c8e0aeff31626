"""Which backends there are, and which one a device gets."""

from __future__ import annotations

import torch

from cacheblend_kernels.interface import KernelBackend, KernelError

BACKENDS = ("torch",)


def select_backend(name: str, device: torch.device) -> KernelBackend:
    """The backend of that name for the device; `auto` takes the best one there is.

    Raises KernelError when there is no such backend.
    """
    if name not in ("auto", *BACKENDS):
        raise KernelError(f"unknown attention backend {name!r}", f"known: auto, {', '.join(BACKENDS)}")
    from cacheblend_kernels.torch_backend import TorchBackend

    return TorchBackend()
