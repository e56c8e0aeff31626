"""Matrix products with a model's weights, in the layout that is fastest on the device."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from cacheblend_kernels import compiled
from cacheblend_kernels.torch_attention import onednn_multiplies
from torch import Tensor

from cacheblend_cli.errors import DeviceError, check_known

WEIGHT_DTYPES = ("auto", "int8")  # auto: the compute dtype
CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "64"}
"""Capacity of two caches per product shape: compiled oneDNN products (half a MiB each), and torch's descriptions of
them (a quarter of a MiB each). Each number of rows is a shape, and both caches default to 1,024 entries: a long-running
engine would fill them (benchmarks/results/soak.md)."""
STEADY_ROWS = 4
"""Number of rows from which, on a CPU, a row's product is the same to the bit for any number of rows (oneDNN's and
MKL's). Up to three rows are summed in another order, unless `Product.is_steady`."""
LEAST = 1e-12  # minimum of a row's largest value: rows of zeros stay zeros; same in cpu/activations.h
NUMBERS_AT_ONCE = 1 << 18  # elements rounded to int8 at once: as many as stay in a core's cache in float32
# Overloads, if torch has oneDNN: called directly, without overload resolution.
_packed_product: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_int8_product: Any = getattr(getattr(torch.ops.onednn, "qlinear_pointwise", None), "default", None)


def bound_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set CACHES unless the user has set them. They are read at the first product, when weights are packed."""
    for name, capacity in CACHES.items():
        if name.replace("ONEDNN_", "DNNL_") not in environment:  # the older name, which oneDNN reads too
            environment.setdefault(name, capacity)


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN can keep this weight in its own layout. Products on a CPU are then about twice as fast in
    fp32, and a third faster in bf16 (benchmarks/README.md). A meta tensor stands for a CPU weight whose packed form is
    read later (model/packed_cache.py)."""
    return weight.device.type in ("cpu", "meta") and onednn_multiplies(weight.dtype)


class Product(ABC):
    """x -> x W^T + b with a weight in oneDNN's layout (`packed`), or a plain one. shape: of W, [out, in].

    Few rows are multiplied by compiled code, which reads the same layout faster, if it gives oneDNN's bits: a row's
    result does not depend on the number of rows (`is_steady`).
    """

    packed: bool
    weight: Tensor
    scales: Tensor | None = None
    num_bytes: int

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> None:
        self.shape, self.dtype, self.bias = shape, dtype, bias
        self._memory: object = None

    def restore(self, weight: Tensor, scales: Tensor | None, memory: object) -> None:
        """Take a previously packed weight and its scales. memory: owner of their memory, held with this product."""
        self.weight, self.scales, self._memory = weight, scales, memory

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in]. Returns [num_rows, out]."""
        if x.shape[0] <= compiled.MOST_ROWS and self._addresses and x.dtype == self.dtype:
            out = compiled.product(x, self._addresses, self.shape)
            if out is not None:
                return out
        return self._multiplied(x, self.bias)

    @property
    def is_steady(self) -> bool:
        """Return whether a row's result has the same bits for any number of rows, not only from STEADY_ROWS on."""
        return self.scales is not None or bool(self._addresses)  # sums of int8 are exact

    @property
    def gives_rows(self) -> bool:
        """Return whether `rows` is available: the layout in memory is known, and the weight is not rounded to int8."""
        return self.scales is None and bool(self._addresses)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of the weight, [n, in], read from the layout for compiled code. indices: [n] int64."""
        (outputs, inputs), num_values = self.shape, 4 // self.dtype.itemsize
        size = outputs * inputs * self.dtype.itemsize
        memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(self.weight))
        words = torch.frombuffer(memory, dtype=self.dtype).view(-1, inputs // num_values, compiled.OUTPUTS, num_values)
        return words[indices // compiled.OUTPUTS, :, indices % compiled.OUTPUTS].flatten(1)

    @abstractmethod
    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by torch, for any number of rows."""

    @cached_property
    def _addresses(self) -> tuple[int, int, int] | tuple[()]:
        """Addresses of weight, scales and bias, or 0; () if compiled code does not multiply few rows."""
        bias, scales = self.bias, self.scales
        if not self.weight.is_mkldnn or (bias is not None and (bias.dtype != self.dtype or not bias.is_contiguous())):
            return ()
        found = torch.ops.mkldnn.data_ptr(self.weight), 0 if scales is None else scales.data_ptr()
        layout = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(self.weight).tolist())
        case = layout, self.dtype, torch.get_num_threads()
        if case not in _ALIKE:
            _ALIKE[case] = self._is_alike(*found)
        return (*found, 0 if bias is None else bias.data_ptr()) if _ALIKE[case] else ()

    def _is_alike(self, weight: int, scales: int) -> bool:
        """Return whether the compiled product gives oneDNN's bits, by comparing a random row."""
        x = torch.randn(STEADY_ROWS, self.shape[1], generator=torch.Generator().manual_seed(0)).to(self.dtype)
        result = compiled.product(x[:1], (weight, scales, 0), self.shape)
        if result is None or not result.any():  # zeros are equal in any order
            return False
        subtracted = -result[0]
        rest = compiled.product(x[:1], (weight, scales, subtracted.data_ptr()), self.shape)
        return rest is not None and torch.equal(rest[0], self._multiplied(x, subtracted)[0])


_ALIKE: dict[tuple[bytes, torch.dtype, int], bool] = {}  # by layout in memory and number of threads


class Linear(Product):
    """A product in the weights' dtype. weight: [out, in], or oneDNN's opaque packed form; bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), weight.dtype, bias)
        self.num_bytes = weight.numel() * weight.element_size() + (0 if bias is None else bias.numel() * bias.itemsize)
        self.packed = pack and can_pack(weight)
        self.weight = weight
        if self.packed and not weight.is_meta:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed:
            out: Tensor = _packed_product(x, self.weight, bias, "none", [], "")
            return out
        return F.linear(x, self.weight, bias)


class Int8Linear(Product):
    """A product with int8 weights (one scale per output channel) and 8-bit x (one scale per row).

    Products and sums are integers, so a row's result does not depend on other rows. (Dynamic W8A8: LLM.int8(), arXiv
    2208.07339, without its outliers; ZeroQuant's token-wise activations, arXiv 2206.01861.) weight: [out, in] of any
    float dtype, bias: [out] or None; `dtype`: of the output. Requires a CPU with VNNI: others saturate.
    """

    packed = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), weight.dtype, bias)
        self._from = self.dtype if onednn_multiplies(self.dtype) else torch.float32  # dtype of the product's result
        whole = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scales = torch.empty(len(weight), device=weight.device)
        at_once = max(1, NUMBERS_AT_ONCE // weight.shape[1])
        for part, ints, scale in zip(*(t.split(at_once) for t in (weight, whole, scales)), strict=True):
            if weight.is_meta:
                break
            rows = part.float()
            scale.copy_(rows.abs().amax(1).clamp_min_(LEAST).div_(127))
            ints.copy_((rows / scale[:, None]).round_())
        self.weight = whole.t() if weight.is_meta else torch.ops.onednn.qlinear_prepack(whole, None)  # [in, out]
        self.scales, self._zeros = scales, torch.zeros(len(scales), dtype=torch.int64)
        self.num_bytes = whole.numel() + scales.numel() * 4 + (0 if bias is None else bias.numel() * bias.itemsize)

    def _multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        whole, scale = _rounded(x, self._from)
        out: Tensor = _int8_product(
            whole, 1.0, 128, self.weight, self.scales, self._zeros, None, 1.0, 0, self._from, "none", [], ""
        )
        out = out.mul_(scale).to(self.dtype)
        return out if bias is None else out.add_(bias)


def may_give_rows(weight: Tensor) -> bool:
    """Return whether a product with this weight is expected to have `gives_rows`, by trying a small weight."""
    fits = weight.device.type == "cpu" and all(size % compiled.OUTPUTS == 0 for size in weight.shape)
    return fits and Linear(torch.ones(compiled.OUTPUTS, compiled.OUTPUTS, dtype=weight.dtype)).gives_rows


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [num_rows, in] as uint8 with 128 for zero, and each row's scale [num_rows, 1] in the product's dtype."""
    fused = compiled.round_rows(x, dtype)
    if fused is not None:
        return fused
    rows = x.float()
    # Round the scale to the product's dtype first; rounded so, it fits at most 127.3 times into a value. Not to
    # float16, which cannot hold small scales.
    scale = rows.abs().amax(1, keepdim=True).clamp_min_(LEAST).div_(127).to(dtype)
    return (rows / scale).add_(128.5).to(torch.uint8), scale  # the conversion truncates


def check_weight_dtype(name: str, device: torch.device) -> None:
    """Raise UsageError for an unknown name, DeviceError if this machine cannot multiply in it."""
    check_known("weight dtype", name, WEIGHT_DTYPES)
    if name == "int8" and (device.type != "cpu" or not torch.cpu._is_vnni_supported()):
        raise DeviceError(
            "--weight-dtype int8 requires a CPU with VNNI, which this machine does not have", "leave --weight-dtype out"
        )


def linear(weight: Tensor, bias: Tensor | None = None, *, weight_dtype: str, pack: bool = True) -> Linear | Int8Linear:
    """Return the product with this weight, stored as `weight_dtype`: one of WEIGHT_DTYPES, or "plain", never packed."""
    if weight_dtype == "int8":
        return Int8Linear(weight, bias)
    return Linear(weight, bias, pack=pack and weight_dtype != "plain")
