"""The fake device in torch.cuda's place: its functions, factories of tensors, and transfers."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _device

from fake_gpu.device import Event, FakeGpu, Graph, Stream
from fake_gpu.order import Region
from fake_gpu.tensors import DeviceTensor, PinnedTensor, parse_to, poison, unwrapped

FACTORIES = (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
)  # fmt: skip
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_PACKAGES = ("cacheblend_store", "cacheblend_cli", "cacheblend_kernels")  # whose caches by device are emptied


@contextmanager
def installed(*args: Any, **kwargs: Any) -> Iterator[FakeGpu]:
    """Put a fake device in torch.cuda's place. Arguments: of `FakeGpu`."""
    gpu = FakeGpu(*args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        _clear_device_caches()
        _replace_cuda(gpu, patch)
        for name in FACTORIES:
            patch.setattr(torch, name, functools.partial(_made, gpu, name, getattr(torch, name)))
        for name in LIKE:
            patch.setattr(torch, name, functools.partial(_made_like, gpu, getattr(torch, name)))
        for name in METHODS:
            patch.setattr(torch.Tensor, name, _method(gpu, name, getattr(torch.Tensor, name)))
        _replace_transfers(gpu, patch)
        try:
            yield gpu
        finally:
            _clear_device_caches()


def _clear_device_caches() -> None:
    """Empty the project's caches of functions of a device: streams and tables of one device are not another's. And
    torch's set of factories, which would be those of before."""
    _device._device_constructors.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in _PACKAGES:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, functools._lru_cache_wrapper) and "device" in inspect.signature(value).parameters:
                value.cache_clear()


def _replace_cuda(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="Fake GPU",
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=132,
        total_memory=gpu.total,
        L2_cache_size=50 << 20,
        max_threads_per_multi_processor=2048,
    )

    def reset_peak(device: Any = None) -> None:
        gpu.peak = gpu.used

    class CurrentDevice:
        def __init__(self, device: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *exc: object) -> None: ...

    class OwnStream(Stream):
        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            gpu.note("stream")
            super().__init__(gpu, priority)

    class OwnEvent(Event):
        def __init__(self, **options: Any) -> None:
            super().__init__(gpu, **options)

    for name, value in {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": CurrentDevice,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: gpu.synchronise("torch.cuda.synchronize"),
        "mem_get_info": lambda device=None: (gpu.total - gpu.used, gpu.total),
        "memory_allocated": lambda device=None: gpu.used,
        "max_memory_allocated": lambda device=None: gpu.peak,
        "memory_reserved": lambda device=None: gpu.used,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "Stream": OwnStream,
        "Event": OwnEvent,
        "current_stream": gpu.current_stream,
        "default_stream": lambda device=None: gpu.default_stream,
        "stream": gpu.on_stream,
        "CUDAGraph": functools.partial(Graph, gpu),
        "graph_pool_handle": lambda: (0, 1),
        "graph": gpu.capture,
        "is_current_stream_capturing": lambda: gpu.capturing,
    }.items():
        patch.setattr(torch.cuda, name, value)
    of_host = torch.Generator

    class Generator(torch.Generator):
        """Draws what a CPU's generator draws."""

        def __new__(cls, device: Any = None) -> Any:
            return of_host("cpu")

    patch.setattr(torch, "Generator", Generator)


def _made(gpu: FakeGpu, name: str, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a factory of torch, for any device."""
    pin, device = kwargs.pop("pin_memory", False), kwargs.get("device")
    data = args[0] if args and name in ("tensor", "as_tensor") else None
    if isinstance(data, DeviceTensor | PinnedTensor):
        made = data.to(device=data.device if device is None else device, dtype=kwargs.get("dtype"))
        return made.clone() if name == "tensor" else made
    if not is_cuda(device):
        out = real(*args, **kwargs)
        return gpu.pinned(out) if pin else out
    kwargs["device"] = "cpu"
    with gpu.lock:
        out = real(*args, **kwargs)
        if data is not None and out.numel():
            gpu.pageable(f"torch.{name} of {tuple(out.shape)}")
        return _filled(gpu, name, out, lambda: real(*args, **kwargs))


def _made_like(gpu: FakeGpu, real: Callable[..., Any], other: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call zeros_like and the like, also for another device."""
    device = kwargs.pop("device", None)
    if device is None or (is_cuda(device) and isinstance(other, DeviceTensor)):
        return real(other, *args, **kwargs)
    if not is_cuda(device):
        return real(unwrapped(other), *args, device=device, **kwargs)
    with gpu.lock:
        out = real(other, *args, **kwargs)
        return _filled(gpu, real.__name__, out, lambda: real(other, *args, **kwargs))


def _method(gpu: FakeGpu, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method like new_zeros, whose result is on the tensor's device unless another is named."""

    def made(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if not (isinstance(tensor, DeviceTensor) if device is None else is_cuda(device)):
            return real(unwrapped(tensor), *args, **kwargs)
        kwargs.pop("device", None)
        with gpu.lock:
            out = real(unwrapped(tensor), *args, **kwargs)
            if name == "new_tensor":
                gpu.pageable(name)
            return _filled(gpu, name.removeprefix("new_"), out, lambda: real(unwrapped(tensor), *args, **kwargs))

    return made


def _filled(gpu: FakeGpu, name: str, out: torch.Tensor, again: Callable[[], torch.Tensor]) -> DeviceTensor:
    """Wrap what a factory made. again: makes it again at a replay."""
    made = gpu.tensor(out)
    if name.startswith("empty"):
        poison(out)
        return made

    def fill() -> None:
        gpu.access(made.memory, Region.of(out), write=True)
        out.copy_(again())

    gpu.access(made.memory, Region.of(out), write=True)
    gpu.record(fill)
    return made


def _replace_transfers(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    real_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names_device = "device" in kwargs or (args and not isinstance(args[0], torch.dtype))
        if names_device and not isinstance(tensor, DeviceTensor):
            device, dtype, non_blocking, _ = parse_to(*args, **kwargs)
            if is_cuda(device):
                return gpu.upload(tensor, dtype, non_blocking)
        return real_to(tensor, *args, **kwargs)

    def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return tensor.to("cuda", non_blocking=non_blocking)

    patch.setattr(torch.Tensor, "to", to)
    patch.setattr(torch.Tensor, "cuda", cuda)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: gpu.pinned(tensor.clone()))
    patch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: False)


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
