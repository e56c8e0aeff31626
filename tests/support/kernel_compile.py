"""Compile a kernel for an architecture and read its resources: registers, spills, shared memory. Needs no GPU."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from dataclasses import dataclass

import triton
from cacheblend_kernels.triton_backend.checks import interpreted
from kernel_variants import KernelVariant
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory per block (CUDA C++ programming guide, table 'Technical Specifications per Compute
Capability'). 80 stands for 8.x and 12.x, which run the same tiles: the minimum of them, though 8.0 itself has 163
KiB."""

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class KernelResources:
    """Resources of a compiled kernel."""

    family: str
    label: str
    arch: int
    num_warps: int
    num_stages: int
    registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads
    shared_bytes: int  # per block
    matrix: str  # matrix instruction used

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_MEMORY[self.arch] and self.registers * self.num_warps * 32 <= 65536


def compile_variant(variant: KernelVariant, arch: int) -> KernelResources:
    """Compile for compute capability `arch` (80, 90, 100) and read ptxas's own account of the result."""
    assert not interpreted(), "kernels are interpreted in this process, there is nothing to compile"
    names = list(variant.kernel.arg_names)
    source = ASTSource(
        variant.kernel,
        variant.signature(),
        {(names.index(name),): value for name, value in variant.constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in variant.aligned()},
    )
    log = io.StringIO()
    knobs = triton.knobs
    with (
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(log),
    ):
        warnings.simplefilter("ignore")
        knobs.nvidia.dump_ptxas_log = True  # ptxas prints its account only when it runs,
        knobs.compilation.always_compile = True  # which a cached kernel would skip
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
        )
    text = log.getvalue()
    registers, spills = _REGISTERS.findall(text), _SPILLS.findall(text)
    if not registers or not spills:
        raise RuntimeError(f"no register account in what ptxas printed:\n{text}")
    ptx = compiled.asm["ptx"]
    matrix = next((name for name in ("tcgen05.mma", "wgmma.mma", "mma.sync") if name in ptx), "")
    return KernelResources(
        family=variant.family,
        label=variant.label,
        arch=arch,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        registers=max(map(int, registers)),
        spill_bytes=sum(int(n) for pair in spills for n in pair),
        shared_bytes=int(compiled.metadata.shared),
        matrix=matrix,
    )
