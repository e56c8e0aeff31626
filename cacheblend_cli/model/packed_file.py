"""A file of packed weights: oneDNN's layout as it is in memory, mapped and used without a copy.

    magic, 8 bytes | length of the header, uint64 | header, JSON | blobs, each at a multiple of ALIGNMENT | xxh3-128 of
    all before

The layout belongs to one version of torch on one kind of CPU: model/packed_cache.py keeps files apart by both.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from cacheblend_store.private_files import open_file
from torch import Tensor

from cacheblend_cli.model.linear import Product

MAGIC = b"cbpack01"
ALIGNMENT = 64
DIGEST_BYTES = 16
_MKLDNN_LAYOUT = 3  # c10::Layout::Mkldnn
_PIECE = 64 << 20  # bytes per write
_HERE = "cacheblend_cli.model."


class PackedMismatch(Exception):
    """The file does not match this model."""


def members_of(root: object) -> Iterator[tuple[str, Product | Tensor]]:
    """Yield every product of a decoder, and every tensor outside products, with its attribute path."""
    seen, left = {id(root)}, [("", root)]
    while left:
        name, found = left.pop()
        if name and isinstance(found, Product | Tensor):
            yield name, found
            continue
        if isinstance(found, Mapping):
            members = [(str(key), value) for key, value in found.items()]
        elif isinstance(found, list | tuple):
            members = [(str(index), value) for index, value in enumerate(found)]
        else:
            members = list(vars(found).items()) if type(found).__module__.startswith(_HERE) else []
        for key, value in members:
            if id(value) not in seen:
                seen.add(id(value))
                left.append((f"{name}.{key}" if name else key, value))


def hollow_products(decoder: object) -> dict[str, Product]:
    """Return the products whose weights are meta tensors. Raises PackedMismatch if any other tensor is one."""
    hollow = {}
    for name, member in members_of(decoder):
        if isinstance(member, Tensor):
            if member.is_meta:
                raise PackedMismatch(name)
        elif member.weight.is_meta:
            if not member.packed:
                raise PackedMismatch(name)
            hollow[name] = member
    return hollow


def write(path: Path, products: Mapping[str, Product], stopped: Callable[[], bool] = lambda: False) -> None:
    """Write packed products. Raises OSError; PackedMismatch if torch cannot use the file, or if `stopped`."""
    blobs, header, end = list[tuple[int, int]](), dict[str, Any](), 0
    for name, product in products.items():
        weight, scales = product.weight, product.scales
        size, layout = _num_bytes(weight), bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(weight).tolist())
        address = torch.ops.mkldnn.data_ptr(weight)
        if not header:  # find out before writing whether this torch can map the file
            _packed(address, torch.empty(weight.shape, dtype=weight.dtype, device="meta"), layout)
        entry = header[name] = {
            "shape": list(weight.shape), "dtype": str(weight.dtype).removeprefix("torch."), "layout": layout.hex(),
        }  # fmt: skip
        for key, start, count in (
            ("weight", address, size),
            ("scales", 0 if scales is None else scales.data_ptr(), 0 if scales is None else scales.nbytes),
        ):
            if count:
                entry[key], end = end, -(-(end + count) // ALIGNMENT) * ALIGNMENT
                blobs.append((start, count))
    text = json.dumps(header).encode()
    text += b" " * (-(len(MAGIC) + 8 + len(text)) % ALIGNMENT)
    digest = xxhash.xxh3_128()
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as stream:

        def put(data: bytes | memoryview) -> None:
            if stopped():
                raise PackedMismatch(str(path))
            digest.update(data)
            stream.write(data)

        put(MAGIC + len(text).to_bytes(8, "little") + text)
        for address, count in blobs:
            view = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
            for start in range(0, count, _PIECE):
                put(view[start : start + _PIECE])
            put(bytes(-count % ALIGNMENT))
        stream.write(digest.digest())


class PackedFile:
    """A mapped file. Its memory stays mapped as long as a product uses it."""

    def __init__(self, path: Path) -> None:
        """Map a file. Raises OSError, PackedMismatch."""
        with os.fdopen(open_file(path), "rb") as stream:
            if os.fstat(stream.fileno()).st_size < len(MAGIC) + 8 + DIGEST_BYTES:
                raise PackedMismatch(str(path))
            # private and writable: torch takes an address only from a writable buffer
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = len(MAGIC) + 8 + int.from_bytes(self._map[len(MAGIC) : len(MAGIC) + 8], "little")
        try:
            self._header = json.loads(self._map[len(MAGIC) + 8 : self._start]) if self._map[:8] == MAGIC else {}
        except ValueError as error:
            raise PackedMismatch(str(path)) from error

    def is_whole(self) -> bool:
        """Return whether the content is intact. Reads all of it, without Python's lock."""
        view = memoryview(self._map)
        with view, view[:-DIGEST_BYTES] as content, view[-DIGEST_BYTES:] as digest:
            return xxhash.xxh3_128(content).digest() == bytes(digest)

    def fill(self, products: Mapping[str, Product]) -> None:
        """Give each product its packed weight as a view of the mapping. Raises PackedMismatch."""
        for name, product in products.items():
            entry = self._header.get(name)
            own = list(product.weight.shape), str(product.weight.dtype).removeprefix("torch.")
            if entry is None or (entry["shape"], entry["dtype"]) != own:
                raise PackedMismatch(name)
            address, scales = self._address + self._start + entry["weight"], None
            weight = _packed(address, product.weight, bytes.fromhex(entry["layout"]))
            if product.scales is not None:
                start = self._start + entry["scales"]
                scales = torch.frombuffer(self._map, dtype=torch.float32, count=len(product.scales), offset=start)
            product.restore(weight, scales, self._map)


def num_bytes(products: Mapping[str, Product]) -> int:
    return sum(_num_bytes(product.weight) for product in products.values())


def _num_bytes(packed: Tensor) -> int:
    return int(torch.ops.mkldnn._nbytes(packed))


def _packed(address: int, like: Tensor, layout: bytes) -> Tensor:
    """Return a tensor in oneDNN's layout over that memory, as torch's compiled models do. Raises PackedMismatch."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    contiguous = torch.empty_like(like, memory_format=torch.contiguous_format)
    sizes, strides = ((ctypes.c_int64 * like.ndim)(*numbers) for numbers in (like.shape, contiguous.stride()))
    handle, integer = ctypes.c_void_p(), ctypes.c_int64
    dtype = getattr(library, f"aoti_torch_dtype_{str(like.dtype).removeprefix('torch.')}")()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address), integer(like.ndim), sizes, strides, integer(0), ctypes.c_int32(dtype),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()), ctypes.c_int32(0), ctypes.byref(handle),
        ctypes.c_int32(_MKLDNN_LAYOUT), layout, integer(len(layout)),
    )  # fmt: skip
    if failed:
        raise PackedMismatch("torch did not accept the layout")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle.value, None, None))
    if not tensor.is_mkldnn or tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise PackedMismatch("torch created a different tensor")
    return tensor
