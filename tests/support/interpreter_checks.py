"""pytest plugin: checks every access of kernels in Triton's interpreter, as compute-sanitizer does on a GPU.

    TRITON_INTERPRET=1 PYTHONPATH=tests/support pytest -p interpreter_checks tests/kernels/numeric

An access must be inside a tensor of the launch. Programs of a launch run in any order, so none may read what another
one writes, or write what another one reads or writes; atomics of several programs may meet. A test fails if one of its
launches breaks these rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

_MANY = -1  # of programs


@dataclass
class _Span:
    """Bytes of a tensor, or of several that overlap. By byte: program that wrote, read and changed it atomically; 0 for
    none, _MANY for several."""

    start: int
    end: int
    names: str
    users: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: str) -> Any:
        if kind not in self.users:
            self.users[kind] = np.zeros(self.end - self.start, dtype=np.int32)
        return self.users[kind]


CONFLICTS = {"read": ("write", "atomic"), "write": ("read", "write", "atomic"), "atomic": ("read", "write")}


class Checks:
    """Accesses of one launch at a time. found: (kernel, message) -> number."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.num_launches = self.num_accesses = 0
        self._kernel, self._program = "", 1
        self._spans: list[_Span] = []
        self._starts = np.zeros(0, dtype=np.uint64)
        self._ends = self._starts

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        """Begin a launch. arguments: on the host, by name."""
        ranges = []
        for name, value in arguments.items():
            tensor = getattr(value, "base", value)
            if hasattr(tensor, "data_ptr") and tensor.numel():
                last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                ranges.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), name))
        self._spans = []
        for start, end, name in sorted(ranges):
            if self._spans and start < self._spans[-1].end:
                span = self._spans[-1]
                span.end, span.names = max(end, span.end), f"{span.names}, {name}"
            else:
                self._spans.append(_Span(start, end, name))
        self._starts = np.array([span.start for span in self._spans], dtype=np.uint64)
        self._ends = np.array([span.end for span in self._spans], dtype=np.uint64)
        self._kernel, self.num_launches = kernel, self.num_launches + 1

    def begin_program(self, x: int, y: int, z: int) -> None:
        self._program = 1 + x + 1009 * (y + 1009 * z)

    def access(self, kind: str, pointers: Any, mask: Any, size: int) -> Any:
        """Check an access, and return the mask without what is out of bounds. pointers: addresses; mask: those that are
        accessed; size: bytes of an element."""
        self.num_accesses += 1
        chosen = np.broadcast_to(np.asarray(mask).astype(bool), np.shape(pointers))
        addresses = np.unique(np.asarray(pointers)[chosen].astype(np.uint64))
        if not addresses.size:
            return mask
        which = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        outside = (which < 0) | (addresses + np.uint64(size) > self._ends[np.maximum(which, 0)])
        if outside.any():
            self._report(f"{kind} out of bounds: {self._nearest(int(addresses[outside][0]), size)}")
            inside = ~np.isin(np.asarray(pointers).astype(np.uint64), addresses[outside])
            mask = (chosen & inside).astype(np.asarray(mask).dtype)
        for number in np.unique(which[~outside]):
            span = self._spans[int(number)]
            at = (addresses[(which == number) & ~outside] - np.uint64(span.start)).astype(np.int64)
            for other in CONFLICTS[kind]:
                users = span.of(other)[at] if other in span.users else 0
                if np.any((users != 0) & (users != self._program)):
                    self._report(f"{kind} of {span.names} where another program has {_PAST[other]}")
            own = span.of(kind)
            own[at] = np.where((own[at] == 0) | (own[at] == self._program), self._program, _MANY)
        return mask

    def _nearest(self, address: int, size: int) -> str:
        if not self._spans:
            return "the launch has no tensors"
        before, after = (lambda s: max(0, s.start - address)), (lambda s: max(0, address + size - s.end))
        span = min(self._spans, key=lambda s: before(s) + after(s))
        where = f"{before(span)} bytes before" if before(span) else f"{after(span)} bytes past the end of"
        return f"{where} {span.names}"

    def _report(self, message: str) -> None:
        self.found[self._kernel, message] += 1


_PAST = {"read": "read", "write": "written", "atomic": "changed atomically"}


class _Checked:
    """Triton's interpreter module, with checked accesses."""

    def __init__(self, real: Any, checks: Checks) -> None:
        self._real, self._checks = real, checks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        mask = self._checks.access("read", pointers, mask, np.dtype(dtype).itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        mask = self._checks.access("write", pointers, mask, values.dtype.itemsize)
        return self._real.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        mask = self._checks.access("atomic", pointers, mask, values.dtype.itemsize)
        return self._real.atomic_rmw(operation, pointers, values, mask, order)

    def atomic_cas(self, pointers: Any, compared: Any, values: Any, order: Any) -> Any:
        self._checks.access("atomic", pointers, True, values.dtype.itemsize)
        return self._real.atomic_cas(pointers, compared, values, order)


def install(checks: Checks, patch: pytest.MonkeyPatch) -> None:
    """Check all launches in the interpreter."""
    from triton.runtime import interpreter

    to_host, set_grid = interpreter.GridExecutor._init_args_hst, interpreter.InterpreterBuilder.set_grid_idx

    def begin(launch: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = to_host(launch, args, kwargs)
        checks.begin(launch.fn.__name__, dict(zip(launch.arg_names, args, strict=False)) | kwargs)
        return args, kwargs

    def begin_program(builder: Any, x: int, y: int, z: int) -> None:
        checks.begin_program(x, y, z)
        set_grid(builder, x, y, z)

    patch.setattr(interpreter.GridExecutor, "_init_args_hst", begin)
    patch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", begin_program)
    patch.setattr(interpreter, "_interpreter", _Checked(interpreter._interpreter, checks))


_CHECKS, _PATCH = Checks(), pytest.MonkeyPatch()


def pytest_configure(config: pytest.Config) -> None:
    install(_CHECKS, _PATCH)


def pytest_unconfigure(config: pytest.Config) -> None:
    _PATCH.undo()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _CHECKS.found.clear()
    result = yield
    if _CHECKS.found:
        lines = (f"{kernel}: {message} ({count} times)" for (kernel, message), count in _CHECKS.found.items())
        pytest.fail("\n".join(lines), pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _CHECKS.num_launches:
        line = f"checked {_CHECKS.num_accesses:,} accesses of {_CHECKS.num_launches:,} launches"
        terminalreporter.write_line(line)
