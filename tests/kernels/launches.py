"""What a Triton launch would compile, as Triton itself derives it from the arguments, on a machine without a GPU.

The launcher's own binder runs, on CPU tensors, up to the point where the kernel would be compiled: argument types,
constants, alignments and options are those of a launch on a GPU of the architecture. Nothing is compiled or run, so
outputs stay as they were allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from cacheblend_kernels.triton_backend import backend, checks
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver


@dataclass(frozen=True)
class Launch:
    """types, constants: by argument name; aligned: arguments known to be multiples of 16."""

    kernel: Any
    arch: int
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: frozenset[str]
    num_warps: int
    num_stages: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for launches that share the compiled code, up to alignments."""
        return (
            self.kernel.__name__,
            *(tuple(sorted(d.items())) for d in (self.types, self.constants)),
            self.num_warps,
            self.num_stages,
        )

    def __str__(self) -> str:
        return (
            f"{self.kernel.__name__} for sm_{self.arch}: {self.types}, {self.constants}, aligned {sorted(self.aligned)}"
        )

    def lower(self) -> None:
        """Kernel and arguments through Triton's front end, where types meet. Raises what a launch would."""
        names = self.kernel.arg_names
        source = ASTSource(
            self.kernel,
            self.types,
            {(names.index(name),): value for name, value in self.constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )
        target = GPUTarget("cuda", self.arch, 32)
        compiler = make_backend(target)
        options = compiler.parse_options({"num_warps": self.num_warps, "num_stages": self.num_stages})
        context = triton._C.libtriton.ir.context()
        triton._C.libtriton.ir.load_dialects(context)
        compiler.load_dialects(context)
        source.make_ir(
            target, options, compiler.get_codegen_implementation(options), compiler.get_module_map(), context
        )


class _Driver:
    """A GPU of which only the architecture is known. Binders are kept by device, so each architecture is one."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return -self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


@contextmanager
def recorded(arch: int) -> Iterator[list[Launch]]:
    """Launches on CPU tensors are noted, not made."""
    launches: list[Launch] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel, names = fn.jit_function, fn.jit_function.arg_names
        [attributes] = compile["configs"]
        launches.append(
            Launch(
                kernel,
                arch,
                compile["signature"],
                {names[path[0]]: value for path, value in compile["constants"].items()},
                frozenset(names[path[0]] for path, marks in attributes.items() if ["tt.divisibility", 16] in marks),
                compile["num_warps"],
                compile["num_stages"],
            )
        )
        return True  # which Triton takes for "compiled elsewhere": it goes no further

    with pytest.MonkeyPatch.context() as patch, triton.knobs.runtime.scope():
        for module in (backend, checks):
            patch.setattr(module, "interpreted", lambda: True)  # CPU tensors are taken
        patch.setattr(driver, "_active", _Driver(arch))
        triton.knobs.runtime.jit_cache_hook = note
        yield launches
