"""A rank's part of a checkpoint as a source of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from cacheblend_kernels import RowTable
from torch import Tensor

from cacheblend_cli.model.adapter import Delta
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import SafetensorsFiles, TensorSource
from cacheblend_cli.model.weight_map import expected_shapes, name_in

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of rows, in order."""


@dataclass(frozen=True)
class Cut:
    """Part of a tensor that a rank needs."""

    rows: Runs | None = None  # None: all
    columns: tuple[int, int] | None = None  # None: all
    is_zero: bool = False  # zeros instead of the tensor (a bias that another rank adds)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        rows = whole[:1] if self.rows is None else (sum(end - start for start, end in self.rows),)
        return rows + (whole[1:] if self.columns is None else (self.columns[1] - self.columns[0],))


class ShardedTensors:
    """A `TensorSource` over another one: only the tensors, rows and columns that a rank needs. Nothing else is read
    from safetensors files. Quantised tensors are dequantised in blocks of rows before they are cut."""

    def __init__(self, source: TensorSource, cuts: Mapping[str, Cut], model: ModelSpec) -> None:
        """cuts: by name in the checkpoint; model: the whole one."""
        self._source, self._cuts, self._whole = source, cuts, expected_shapes(model)
        self._of = dict[str, Cut]()
        self.block_bytes = source.block_bytes

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for stored, kind, found in self._source.headers():
            name = name_in(self._cuts, stored)
            if name is None:
                if name_in(self._whole, stored) is None:
                    yield stored, kind, found
                continue
            cut = self._cuts[name]
            whole = self._whole.get(name)
            if whole is not None and found != whole[0]:
                cut = Cut()  # another model's tensor: its shape is refused later
            self._of[stored] = cut
            yield stored, kind, cut.shape(found)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        cut = self._of.get(name, Cut())
        if cut.is_zero:
            return torch.zeros(stop - start)
        runs = _runs(cut, start, stop)
        if len(runs) == 1:
            return self._rows(name, *runs[0], cut)
        return torch.cat([self._rows(name, a, b, cut).clone() for a, b in runs])  # each is valid until the next is read

    def rows(self, name: str) -> RowTable | None:
        cut = self._of.get(name, Cut())
        table = None if cut.is_zero else self._source.rows(name)
        if table is None:
            return None
        if cut.rows is not None:
            table = table[torch.cat([torch.arange(*run) for run in cut.rows])]
        return table if cut.columns is None else table.columns(*cut.columns)

    def _rows(self, name: str, start: int, stop: int, cut: Cut) -> Tensor:
        if cut.columns is None:
            return self._source.read(name, start, stop)
        if isinstance(self._source, SafetensorsFiles):
            return self._source.read(name, start, stop, slice(*cut.columns))
        return self._source.read(name, start, stop)[:, slice(*cut.columns)]


def cut_deltas(deltas: dict[str, Delta], cuts: Mapping[str, Cut]) -> dict[str, Delta]:
    """Return a rank's part of an adapter's updates, by name in the checkpoint."""
    cut = dict[str, Delta]()
    for name, delta in deltas.items():
        of = cuts.get(name)
        if of is not None:
            down = delta.down if of.columns is None else delta.down[:, slice(*of.columns)]
            up = delta.up if of.rows is None else torch.cat([delta.up[a:b] for a, b in of.rows])
            cut[name] = Delta(down, up, delta.scale)
    return cut


def _runs(cut: Cut, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the rows of the stored tensor for rows start:stop of the cut one."""
    if cut.rows is None:
        return [(start, stop)]
    found, at = [], 0
    for a, b in cut.rows:
        low, high = max(start, at), min(stop, at + b - a)
        if low < high:
            found.append((a + low - at, a + high - at))
        at += b - a
    return found
