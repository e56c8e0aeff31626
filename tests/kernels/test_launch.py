"""A launch like an earlier one runs the kernel that was compiled for it, and no other launch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl
from cacheblend_kernels.triton_backend import launches
from cacheblend_kernels.triton_backend.launches import launch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


@triton.jit(do_not_specialize=["first"])
def kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, count, first, scale, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    at = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < count) * scale, mask=at < count)


class Compiled(CompiledKernel):
    """A compiled kernel that notes its launches."""

    def __init__(self) -> None:
        self.module = None
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, stream: self.launches.append((grid, *arguments))


class Driver:
    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Kernels in the order in which Triton was asked to compile and launch them."""
    found: list[Compiled] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        found.append(Compiled())
        return found[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(launches, "_compiled", {})
    return found


MEMORY = torch.zeros(64)
LIKE_IT: dict[str, Any] = {
    "x_ptr": MEMORY, "y_ptr": None, "count": 48, "first": 3, "scale": 0.5, "BLOCK": 16, "ADD": False, "num_warps": 4,
}  # fmt: skip


def run(**changed: Any) -> None:
    launch(kernel, (2,), **{**LIKE_IT, **changed})


def test_a_launch_like_the_first_is_not_compiled_again(compiled: list[Compiled]) -> None:
    other = torch.zeros(8)
    run()
    run(x_ptr=other, count=32, scale=0.25)
    launch(kernel, (5, 7), other, None, 48, 3, 0.5, BLOCK=16, ADD=False, num_warps=4)
    assert len(compiled) == 1
    assert compiled[0].launches == [
        ((2, 1, 1), other, None, 32, 3, 0.25, 16, False),
        ((5, 7, 1, 1), other, None, 48, 3, 0.5, 16, False),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"x_ptr": MEMORY[1:]},  # not aligned
        {"x_ptr": MEMORY.to(torch.bfloat16)},
        {"y_ptr": MEMORY},
        {"count": 47},
        {"count": 1},
        {"count": 1 << 31},
        {"count": 1 << 40},
        {"BLOCK": 32},
        {"ADD": True},
        {"num_warps": 8},
        {"num_stages": 2},
    ],
    ids=str,
)
def test_another_launch_is_compiled(changed: dict[str, Any], compiled: list[Compiled]) -> None:
    run()
    run(**changed)
    assert len(compiled) == 2
    run()
    run(**changed)
    assert len(compiled) == 2


def test_each_device_has_its_own(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr(Driver, "device", 1)
    run()
    assert len(compiled) == 2
