"""Triton kernels on the fake device: launches are checked and counted, results are the torch backend's."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cacheblend_kernels.interface import AttentionMetadata, KernelBackend, LayerCache
from cacheblend_kernels.torch_backend import TorchBackend

from fake_gpu import references
from fake_gpu.device import FakeGpu
from fake_gpu.order import Region
from fake_gpu.tensors import DeviceTensor, tensors_in, unwrapped

WRITES = {
    "add_rms_norm": ("residual",),
    "attention_peaks": ("peaks",),
    "correct_stale": ("cache",),
    "load_kv": ("cache",),
    "load_layers": ("caches",),
    "rope_and_cache": ("cache",),
}
"""Method of a kernel backend -> arguments that it writes to. Of other methods, arguments whose contents change."""

REFERENCES: dict[str, Callable[..., Any]] = {
    "attention_peaks": references.attention_peaks,
    "correct_stale": references.correct_stale,
}
"""Methods that the torch backend does not have."""


def watch_launches(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Check and count launches of Triton kernels, without running them."""
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = kernel.arg_names
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            tensor = value.base if isinstance(value, TensorDescriptor) else value
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DeviceTensor):
                raise ValueError(
                    f"Pointer argument {name} of {kernel.__name__} cannot be accessed from Triton (cpu tensor?)"
                )
        gpu.note("launch", kernel.__name__)

    patch.setattr(JITFunction, "run", run)


def compute_with_torch(gpu: FakeGpu, patch: pytest.MonkeyPatch, backend: type[KernelBackend]) -> None:
    """Let every method of a backend check its arguments and launch as on a GPU, and the torch backend compute the
    result, in the order of the current stream."""
    torch_backend = TorchBackend()
    for name, method in inspect.getmembers(KernelBackend, inspect.isfunction):
        own = inspect.getattr_static(backend, name)
        if name.startswith("_") or name == "warm_up" or own is method:
            continue
        reference = REFERENCES.get(name) or getattr(torch_backend, name)
        call = _computed(gpu, name, inspect.signature(method), getattr(backend, name), reference)
        patch.setattr(backend, name, staticmethod(call) if isinstance(own, staticmethod) else _bound(call))


def _bound(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda backend, *args, **kwargs: call(*args, _backend=backend, **kwargs)


def _computed(
    gpu: FakeGpu, name: str, signature: inspect.Signature, original: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, _backend: Any = None, **kwargs: Any) -> Any:
        own = () if _backend is None else (_backend,)
        with gpu.lock:
            if gpu.is_silent:  # called by another method, whose result is computed as a whole
                return original(*own, *args, **kwargs)
            with gpu.journal() as journal, gpu.silent():
                out = original(*own, *args, **kwargs)
            journal.undo()
            bound = signature.bind(_backend, *args, **kwargs)
            given = dict(list(bound.arguments.items())[1:])
            compute = functools.partial(_compute, gpu, name, given, reference, out)
            compute()
            gpu.record(compute)
            return out

    return call


def _compute(gpu: FakeGpu, name: str, given: dict[str, Any], reference: Callable[..., Any], out: Any) -> None:
    """Compute the method's result into `out`, and note what it reads and writes."""
    accesses = {(id(t.memory), region): (argument, t) for argument, t, region in _accesses(given)}
    declared, before = WRITES.get(name), {}
    for (_, region), (argument, t) in accesses.items():
        gpu.access(t.memory, region, write=declared is not None and argument in declared)
        if declared is None:
            gpu.before_write(t.memory)
            before[id(t.memory), region] = t.elem.clone()
    found = reference(**{argument: _on_host(value) for argument, value in given.items()})
    for (memory, region), elem in before.items():
        t = accesses[memory, region][1]
        if not torch.equal(_bytes(elem), _bytes(t.elem)):
            gpu.access(t.memory, region, write=True)
    made = list(tensors_in(out))
    values = list(tensors_in(found))
    assert len(made) == len(values), f"{name} returns {len(made)} tensors, the torch backend {len(values)}"
    for t, value in zip(made, values, strict=True):
        assert (t.shape, t.dtype) == (value.shape, value.dtype), (
            f"{name}: {t.shape} {t.dtype}, {value.shape} {value.dtype}"
        )
        if t.elem is not value:
            gpu.access(t.memory, Region.of(t.elem), write=True)
            t.elem.copy_(value)


def _bytes(elem: torch.Tensor) -> torch.Tensor:
    return elem.contiguous().flatten().view(torch.uint8) if elem.numel() else elem.new_empty(0, dtype=torch.uint8)


def _accesses(given: dict[str, Any]) -> Iterator[tuple[str, DeviceTensor, Region]]:
    """Yield (argument, tensor, bytes) of all tensors. Of a pool only the slots or blocks that the other arguments
    name."""
    rows = _slots(given)
    for argument, value in given.items():
        for part in value if isinstance(value, list | tuple) else [value]:
            for t in _tensors(part):
                if isinstance(part, LayerCache) and rows is not None and t.dim() == 4:
                    yield argument, t, Region.of(t.elem.flatten(0, 1), rows)
                else:
                    yield argument, t, Region.of(t.elem)


def _slots(given: dict[str, Any]) -> set[int] | None:
    """Return the slots of the pool that a method touches; None if its arguments do not name them."""
    meta, cache = given.get("meta"), given.get("cache")
    for value in given.values():
        first = getattr(value, "first_slot", -1)
        slots = getattr(value, "slots", None) if dataclasses.is_dataclass(value) else given.get("slots")
        if isinstance(slots, DeviceTensor):
            return set(range(first, first + len(slots))) if first >= 0 else set(slots.elem.flatten().tolist())
    if isinstance(meta, AttentionMetadata) and isinstance(cache, LayerCache):
        size = cache.k.shape[1]
        return {
            block * size + offset
            for table, length in zip(
                unwrapped(meta.block_table).tolist(), unwrapped(meta.kv_lens).tolist(), strict=True
            )
            for number, block in enumerate(table[: -(-length // size)])
            for offset in range(min(size, length - number * size))
        }
    return None


def _tensors(value: Any) -> Iterator[DeviceTensor]:
    if isinstance(value, DeviceTensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _on_host(value: Any) -> Any:
    """Return the argument with CPU tensors in place of the device's."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _on_host(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, tuple | list):
        return type(value)(map(_on_host, value))
    return unwrapped(value)
