"""Quantised weights as a source of plain ones: rows are dequantised as they are read, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.quantisation import Quantisation
from cacheblend_cli.model.tensor_files import SafetensorsFiles

SCALED = ("F8_E4M3", "I8")
SCALES = ("_scale_inv", "_scale")  # behind the name of a weight
OF_ACTIVATIONS = ("input_scale", "activation_scale")  # activations are not quantised here
PACKED = ("qweight", "qzeros", "scales", "g_idx")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in an int32 the columns of eight are
Header = tuple[str, str, tuple[int, ...]]


class DequantisedTensors:
    """A `TensorSource` over the files of a quantised checkpoint. What is not quantised in them is passed on."""

    def __init__(self, files: SafetensorsFiles, quantisation: Quantisation) -> None:
        self._files, self._how = files, quantisation
        self._shapes: dict[str, tuple[int, ...]] = {}  # of every tensor in the files
        self._quantised: dict[str, tuple[int, int]] = {}  # of every weight that is quantised
        self.block_bytes = files.block_bytes

    def headers(self) -> Iterator[Header]:
        found = list(self._files.headers())
        self._shapes = {name: shape for name, _, shape in found}
        return self._scaled(found) if self._how.method == "scaled" else self._packed(found)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._quantised:
            return self._files.read(name, start, stop)
        if self._how.method == "scaled":
            return self._files.read(name, start, stop).float() * self._scales(name, start, stop)
        base = name.removesuffix("weight")
        return self._gptq_rows(base, start, stop) if self._how.method == "gptq" else self._awq_rows(base, start, stop)

    # a weight of 8 bits beside its scales

    def _scaled(self, found: list[Header]) -> Iterator[Header]:
        for name, kind, shape in found:
            base, _, part = name.rpartition(".")
            if part in OF_ACTIVATIONS or (
                part in ("weight_scale_inv", "weight_scale") and f"{base}.weight" in self._shapes
            ):
                continue
            if kind not in SCALED:
                yield name, kind, shape
                continue
            if len(shape) != 2:
                raise _damaged(name, f"it is quantised and has the shape {list(shape)}")
            self._quantised[name] = (shape[0], shape[1])
            self._check_scales(name, shape[0], shape[1])
            yield name, "F32", shape

    def _scale_name(self, name: str) -> str:
        scale = next((f"{name}{end}" for end in SCALES if f"{name}{end}" in self._shapes), None)
        if scale is None:
            raise _damaged(name, "it is quantised and has no scale")
        return scale

    def _check_scales(self, name: str, rows: int, columns: int) -> None:
        shape, block = self._shapes[self._scale_name(name)], self._how.block
        known = [(), (1,), (rows, 1), (rows,)]
        if block is not None:
            known = [(), (1,), (-(-rows // block[0]), -(-columns // block[1]))]
        if shape not in known:
            raise _damaged(name, f"its scales have the shape {list(shape)}, and {list(known[-1])} is implied")

    def _scales(self, name: str, start: int, stop: int) -> Tensor:
        """To multiply rows `start` to `stop` with."""
        scales, block = self._files.whole(self._scale_name(name)).float(), self._how.block
        if scales.numel() == 1:
            return scales.reshape(1, 1)
        if block is None:
            return scales.reshape(-1, 1)[start:stop]
        of_rows = scales[torch.arange(start, stop) // block[0]]
        return of_rows.repeat_interleave(block[1], dim=1)[:, : self._quantised[name][1]]

    # packed in int32, inputs first

    def _packed(self, found: list[Header]) -> Iterator[Header]:
        for name, kind, shape in found:
            base, _, part = name.rpartition(".")
            if part not in PACKED:
                yield name, kind, shape
                continue
            if f"{base}.qweight" not in self._shapes:
                raise _damaged(name, f"there is no {base}.qweight")
            if part == "qweight":
                yield f"{base}.weight", "F32", self._packed_shape(f"{base}.", kind, shape)

    def _packed_shape(self, base: str, kind: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a packed weight, whose parts are checked."""
        per, size = 32 // self._how.bits, self._how.group_size
        if kind != "I32" or len(shape) != 2:
            raise _damaged(f"{base}qweight", f"it is {kind} {list(shape)}")
        gptq = self._how.method == "gptq"
        inputs, outputs = (shape[0] * per, shape[1]) if gptq else (shape[0], shape[1] * per)
        groups = 1 if size == -1 else -(-inputs // size)
        wanted: dict[str, tuple[int, ...]] = {"qzeros": (groups, outputs // per), "scales": (groups, outputs)}
        if gptq and f"{base}g_idx" in self._shapes:
            wanted["g_idx"] = (inputs,)
        for part, implied in wanted.items():
            if (stored := self._shapes.get(f"{base}{part}")) != implied:
                has = "is missing" if stored is None else f"has the shape {list(stored)}"
                raise _damaged(f"{base}{part}", f"it {has}, and {list(implied)} is implied")
        self._quantised[f"{base}weight"] = (outputs, inputs)
        return outputs, inputs

    def _groups(self, base: str) -> Tensor:
        """The group of each input."""
        if self._how.method == "gptq" and f"{base}g_idx" in self._shapes:
            return self._files.whole(f"{base}g_idx").long()
        inputs, size = self._quantised[f"{base}weight"][1], self._how.group_size
        return torch.arange(inputs) // (inputs if size == -1 else size)

    def _gptq_rows(self, base: str, start: int, stop: int) -> Tensor:
        packed = self._files.columns(f"{base}qweight", start, stop)
        values = _unpack(packed, self._how.bits).transpose(1, 2).flatten(0, 1)  # [inputs, rows]
        zeros = _unpack(self._files.whole(f"{base}qzeros"), self._how.bits).flatten(1)[:, start:stop]
        zeros = (zeros + self._how.zero_offset) & (2**self._how.bits - 1)
        return self._of_groups(base, values, zeros, start, stop)

    def _awq_rows(self, base: str, start: int, stop: int) -> Tensor:
        first, last = start // 8, -(-stop // 8)
        cut = slice(start - 8 * first, stop - 8 * first)
        values, zeros = (
            _unpack(self._files.columns(f"{base}{part}", first, last), 4)[..., AWQ_ORDER].flatten(1)[:, cut]
            for part in ("qweight", "qzeros")
        )
        return self._of_groups(base, values, zeros, start, stop)

    def _of_groups(self, base: str, values: Tensor, zeros: Tensor, start: int, stop: int) -> Tensor:
        """values: [inputs, rows], zeros: [groups, rows]. Returns [rows, inputs]."""
        groups, scales = self._groups(base), self._files.columns(f"{base}scales", start, stop).float()
        return ((values - zeros[groups]).float() * scales[groups]).T


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """[a, b] int32 -> [a, b, values in an int32], the lowest bits first."""
    return (packed[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)


def _damaged(name: str, reason: str) -> UsageError:
    return UsageError(f"the quantised tensor {name} is not read: {reason}", "fetch the checkpoint again")
