"""Tensors of the fake device and of pinned host memory: wrappers around CPU tensors, and the rules of each operation.

The wrappers are CPU tensors to C++, so no device guard is needed; their Python properties say cuda:0. Operations arrive
in `__torch_dispatch__`, composite ones are decomposed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import torch

from fake_gpu.order import Accesses, Region

if TYPE_CHECKING:
    from fake_gpu.device import FakeGpu, Stream

DEVICE = torch.device("cuda", 0)

READS_ON_HOST = {
    "_local_scalar_dense", "_linalg_check_errors", "_unique", "_unique2", "bincount", "cholesky_solve", "equal", "histc",
    "is_nonzero", "masked_select", "multinomial", "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
"""Operations that wait for the device: their result, or its size, is known to the host. `cholesky_solve` is MAGMA's."""
NO_HOST_SCALARS = {"cat", "gather", "index_copy_", "index_select", "scatter", "scatter_", "stack"}
NO_FLOAT8 = {
    "abs", "add", "amax", "clamp", "index_copy_", "index_select", "masked_fill", "masked_fill_", "mul", "sort",
}  # fmt: skip
NO_STORAGE_CHANGES = {"resize_", "set_"}
ISIN_SORTS = (10, 0.145)  # from so many test elements on, a GPU's isin sorts: 10 * elements ** 0.145
_INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_")


class Memory:
    """One allocation of the device, or of pinned host memory."""

    def __init__(self, gpu: FakeGpu, elem: torch.Tensor, pinned: bool = False) -> None:
        self.gpu, self.pinned, self.accesses = gpu, pinned, Accesses()
        self.storage, self.stream = elem.untyped_storage(), gpu.current_stream()
        self.recorded: set[int] = set()  # streams of record_stream
        self.num_bytes = 0 if pinned else self.storage.nbytes()
        self.number, self.born = gpu.allocated(self.num_bytes), gpu.origin()

    def __del__(self) -> None:
        if hasattr(self, "born"):
            self.gpu.freed(self)


class _Wrapper(torch.Tensor):
    elem: torch.Tensor
    memory: Memory

    @classmethod
    def of(cls, elem: torch.Tensor, memory: Memory) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device="cpu",
            requires_grad=False,
        )
        made.elem, made.memory = elem, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(t.memory.gpu for t in tensors_in((args, kwargs)) if isinstance(t, _Wrapper))
        with gpu.lock:
            return _Operation(gpu, func, args, kwargs or {}).run()

    def is_pinned(self, device: Any = None) -> bool:
        return self.memory.pinned

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()


class DeviceTensor(_Wrapper):
    """A tensor on cuda:0."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.elem!r})"

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        self.memory.gpu.synchronise("tolist")
        return self.elem.tolist()

    def pin_memory(self, *_: Any) -> Any:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream.id)

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.to("cpu")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, copy = parse_to(*args, **kwargs)
        same = dtype is None or dtype == self.dtype
        if device is None or device.type == "cuda":
            if same:
                return self.clone() if copy else self
            return super().to(dtype)
        gpu = self.memory.gpu
        with gpu.lock:
            made = torch.empty_like(self.elem if self.elem.is_contiguous() else self.elem.contiguous())
            host = gpu.pinned(made) if non_blocking else made
            host.copy_(self, non_blocking=non_blocking)
        return host if same else host.to(dtype)


class PinnedTensor(_Wrapper):
    """A tensor in pinned host memory. The host must not touch it while a stream may copy from or to it."""

    def __repr__(self, **_: Any) -> str:
        return f"PinnedTensor({self.elem!r})"

    def numpy(self, **_: Any) -> Any:
        self._touch("numpy")
        return self.elem.numpy()

    def data_ptr(self) -> int:
        self._touch("data_ptr")
        return self.elem.data_ptr()

    def tolist(self) -> Any:
        self._touch("tolist", write=False)
        return self.elem.tolist()

    def pin_memory(self, *_: Any) -> PinnedTensor:
        return self

    def _touch(self, name: str, write: bool = True) -> None:
        with self.memory.gpu.lock:
            self.memory.gpu.host_access(self.memory, Region.of(self.elem), write, name)


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, bool]:
    """Return (device, dtype, non_blocking, copy) of the arguments of `Tensor.to`."""
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], torch.Tensor):
        other, args = args[0], args[1:]
        return other.device, other.dtype, kwargs.get("non_blocking", bool(args and args[0])), copy
    if len(args) > 1 and isinstance(args[-1], bool) and len(args) == (3 if isinstance(args[0], torch.dtype) else 4):
        copy, args = args[-1], args[:-1]
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, non_blocking, copy


def unwrapped(value: Any) -> Any:
    return value.elem if isinstance(value, _Wrapper) else value


class _Operation:
    """One ATen operation with a wrapper among its arguments."""

    def __init__(self, gpu: FakeGpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gpu, self.func, self.args, self.kwargs = gpu, func, args, kwargs
        self.name = func.overloadpacket.__name__
        self.tensors = list(tensors_in((args, kwargs)))
        self.on_device = [t for t in self.tensors if isinstance(t, DeviceTensor)]

    def run(self) -> Any:
        if self.func._can_decompose():
            return self.func.decompose(*self.args, **self.kwargs)
        if self.name in NO_STORAGE_CHANGES:
            raise NotImplementedError(f"{self.func} of a fake GPU's tensor")
        if self.name == "copy_" and isinstance(self.args[0], DeviceTensor) != isinstance(self.args[1], DeviceTensor):
            return self._transfer()
        if not self.on_device:
            return self._on_host()
        self._check_devices()
        self._check_waits()
        return self._on_stream()

    def _check_devices(self) -> None:
        if self.name in _INDEXING:
            indices = [i for i in self.args[1] if i is not None]
            if not isinstance(self.args[0], DeviceTensor) and any(isinstance(i, DeviceTensor) for i in indices):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            values = self.args[2:3]
            host = [t for t in values if isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor)]
        else:
            host = [t for t in self.tensors if not isinstance(t, DeviceTensor)]
        if any(t.dim() > 0 or self.name in NO_HOST_SCALARS for t in host):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({self.func} of {[(str(t.device), tuple(t.shape)) for t in self.tensors]})"
            )
        if self.name in NO_FLOAT8 and any(t.dtype == torch.float8_e4m3fn for t in self.tensors):
            raise NotImplementedError(f'"{self.name}_cuda" not implemented for float8')

    def _check_waits(self) -> None:
        name, args, gpu = self.name, self.args, self.gpu
        if name in READS_ON_HOST:
            gpu.synchronise(name)
        elif name == "repeat_interleave" and self.kwargs.get("output_size") is None:
            gpu.synchronise("repeat_interleave without output_size")
        elif name == "isin" and all(isinstance(t, torch.Tensor) for t in args[:2]):
            factor, power = ISIN_SORTS
            if args[1].numel() >= factor * args[0].numel() ** power and not self.kwargs.get("assume_unique", False):
                gpu.synchronise("isin, which sorts")
        elif name in _INDEXING:
            indices = [i for i in args[1] if i is not None]
            masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
            fills = name != "index" and len(masks) == len(indices) == 1 and args[2].numel() == 1
            if masks and not fills:
                gpu.synchronise(f"{name} with a mask")
            if any(i.dim() > 0 and i.numel() and not isinstance(i, DeviceTensor) for i in indices):
                gpu.pageable(f"indices of {name} on the host")

    def _transfer(self) -> Any:
        """A copy between host and device. Only contiguous pinned memory of the other side's dtype is read or written by
        the device itself: all else goes through pageable memory."""
        to, source = self.args[:2]
        non_blocking = self.args[2] if len(self.args) > 2 else self.kwargs.get("non_blocking", False)
        if not source.numel() or not to.numel():
            return to
        up = isinstance(to, DeviceTensor)
        host, shape = (source, to.shape) if up else (to, source.shape)
        direct = isinstance(host, PinnedTensor) and host.is_contiguous() and to.dtype == source.dtype
        if up and source.dim() == 0 and not isinstance(source, PinnedTensor):
            direct = non_blocking = True  # an argument of the launch
        label = f"{'to' if up else 'from'} the device, {tuple(shape)} {to.dtype}"
        elems = unwrapped(to), unwrapped(source)
        if direct and non_blocking:
            if self.gpu.capturing:
                self.gpu.error("copy from or to host memory in a capture")
            if isinstance(source, _Wrapper):
                self.gpu.access(source.memory, Region.of(source.elem), write=False)
            if isinstance(to, _Wrapper):
                self.gpu.access(to.memory, Region.of(to.elem), write=True)
        else:
            if isinstance(source, _Wrapper):
                self.gpu.access(source.memory, Region.of(source.elem), write=False, on_host=not source.is_cuda)
            if isinstance(to, _Wrapper):
                self.gpu.access(to.memory, Region.of(to.elem), write=True, on_host=not to.is_cuda)
            if up and not direct:
                self.gpu.pageable(label)
            else:
                self.gpu.synchronise(f"copy {label}")
        elems[0].copy_(elems[1])
        return to

    def _on_host(self) -> Any:
        """An operation on pinned memory by the host."""
        if not self._is_view:
            written = list(map(id, self._written()))
            for t in self.tensors:
                if isinstance(t, PinnedTensor):
                    self.gpu.host_access(t.memory, Region.of(t.elem), id(t) in written, self.name)
        return self._wrapped(self.func(*mapped(unwrapped, self.args), **mapped(unwrapped, self.kwargs)), PinnedTensor)

    def _on_stream(self) -> Any:
        """An operation that is queued on the current stream."""
        kwargs = {**self.kwargs, "device": torch.device("cpu")} if self.kwargs.get("device") else self.kwargs
        args, kwargs = mapped(unwrapped, self.args), mapped(unwrapped, kwargs)
        if self._is_view:
            return self._wrapped(self.func(*args, **kwargs), DeviceTensor)
        written = self._written()
        read = [t for t in self.on_device if not any(t is w for w in written)] if "like" not in self.name else []

        def run() -> Any:
            for t in read:
                self.gpu.access(t.memory, self._region(t), write=False)
            for t in written:
                self.gpu.access(t.memory, self._region(t), write=True)
            return self.func(*args, **kwargs)

        found = run()
        out = self._wrapped(found, DeviceTensor)
        fresh = [t for t in tensors_in(out) if not any(t.memory is w.memory for w in self.on_device)]
        if "empty" not in self.name:
            for t in fresh:
                self.gpu.access(t.memory, Region.of(t.elem), write=True)
            if self.gpu.capturing:
                outs = list(tensors_in(out))

                def again() -> None:
                    for t, value in zip(outs, tensors_in(run()), strict=True):
                        if any(t is f for f in fresh):
                            self.gpu.access(t.memory, Region.of(t.elem), write=True)
                            t.elem.copy_(value)

                self.gpu.record(again)
        elif self.name == "empty_like":
            poison(out.elem)
        return out

    def _region(self, t: DeviceTensor) -> Region:
        """Return what the operation touches of an argument: rows, if it is indexed along its first dimension."""
        args = self.args
        by_rows = (
            self.name in ("index_select", "index_copy_", "index_add_") and t is args[0] and args[1] in (0, -t.dim())
        )
        index = args[2] if by_rows else None
        if self.name in _INDEXING and t is args[0] and len(args[1]) == 1:
            index = args[1][0]
        if index is None or not t.elem.is_contiguous() or index.dtype in (torch.bool, torch.uint8):
            return Region.of(t.elem)
        return Region.of(t.elem, (row % len(t.elem) for row in unwrapped(index).flatten().tolist()))

    @property
    def _is_view(self) -> bool:
        returns = self.func._schema.returns
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return views or self.name in ("_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh")

    def _written(self) -> list[Any]:
        """Return the arguments that the operation writes to."""
        arguments = self.func._schema.arguments
        given = [*zip(arguments, self.args, strict=False)]
        given += [(a, self.kwargs[a.name]) for a in arguments if a.name in self.kwargs]
        every = [
            t for a, value in given if a.alias_info is not None and a.alias_info.is_write for t in tensors_in(value)
        ]
        return every if not self._is_view else []

    def _wrapped(self, out: Any, of: type[DeviceTensor | PinnedTensor]) -> Any:
        """Wrap outputs. Those in the memory of an argument share its `Memory`; others are new on the device, and plain
        on the host."""
        wrappers = [t for t in self.tensors if isinstance(t, _Wrapper)]

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, _Wrapper):
                return value
            for t in wrappers:
                if t.elem is value:
                    return t
            storage = value.untyped_storage()
            for t in wrappers:
                if storage.nbytes() and t.memory.storage.data_ptr() == storage.data_ptr():
                    with torch.inference_mode(t.is_inference()):  # a view is an inference tensor if its base is one
                        return of.of(value, t.memory)
            return self.gpu.tensor(value) if of is DeviceTensor else value

        return mapped(wrap, out)


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested tuples, lists and dicts with changed leaves."""
    if isinstance(value, tuple | list):
        return type(value)([mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return change(value)


def poison(elem: torch.Tensor) -> None:
    """Fill uninitialised memory with NaN: a result computed from it shows."""
    if elem.is_floating_point() and elem.element_size() > 1:
        elem.fill_(torch.nan)
