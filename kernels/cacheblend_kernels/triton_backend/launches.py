"""Launches of Triton kernels. A launch like an earlier one looks its compiled kernel up without Triton's binder.

A prefill makes 500 launches or more, alike in every layer, and each takes tens of microseconds of the host's time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[tuple[Any, ...], CompiledKernel] = {}
_parameters: dict[int, tuple[tuple[str, ...], tuple[bool, ...]]] = {}  # by id of the kernel


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, num_stages: int = 3, **named: Any
) -> None:
    """`kernel[grid](...)` on the current device.

    The compiled kernel is looked up by all that Triton specialises on: dtypes and alignment of tensors, constants, and
    whether a number is 1, a multiple of 16, or beyond 32 bits.
    """
    if type(kernel) is not JITFunction:  # Triton's interpreter compiles nothing
        kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages, **named)
        return
    names, constant = _parameters[id(kernel)] if id(kernel) in _parameters else _add_parameters(kernel)
    if named:
        arguments += tuple([named[name] for name in names[len(arguments) :]])
    active: Any = driver.active
    device = active.get_current_device()
    kinds: list[Any] = [id(kernel), device, num_warps, num_stages]  # kernels live as long as their modules
    for value, is_constant in zip(arguments, constant, strict=True):
        if is_constant or value is None:
            kinds.append(value)
        elif isinstance(value, Tensor):
            kinds += value.dtype, value.data_ptr() % 16 == 0
        elif isinstance(value, int):
            kinds += value == 1, value % 16 == 0, value >> 31, value >> 63
        elif isinstance(value, TensorDescriptor):
            kinds += value.base.dtype, tuple(value.block_shape)
        else:
            kinds.append(type(value))
    key = tuple(kinds)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)](*arguments, stream=active.get_current_stream(device))
        return
    found = kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages)
    if isinstance(found, CompiledKernel):
        _compiled[key] = found


def _add_parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Return the names of the parameters, and whether each is a constant."""
    found = tuple(kernel.arg_names), tuple(parameter.is_constexpr for parameter in kernel.params)
    return _parameters.setdefault(id(kernel), found)
