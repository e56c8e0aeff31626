"""GPTQ and AWQ weights: [in, out], packed in int32, with a scale and a zero point per group of inputs and output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.model.families.quantisation import Quantisation
from cacheblend_cli.model.quantised.stored import RowwiseWeight, Shape, Stored, unpack

PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Positions of eight columns in an int32: they are packed 0, 2, 4, 6, 1, 3, 5, 7.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Packed:
    """GPTQ packs values along the inputs and zero points along the outputs; AWQ packs both along the outputs."""

    stored: Stored
    how: Quantisation
    shape: Shape

    def read(self, start: int, stop: int) -> Tensor:
        values, zeros = self._gptq(start, stop) if self.how.method == "gptq" else self._awq(start, stop)
        groups, scales = self._groups(), self.stored.columns("scales", start, stop).float()
        return ((values - zeros[groups]).float() * scales[groups]).T

    def _groups(self) -> Tensor:
        """Return the group of each input."""
        if "g_idx" in self.stored:
            return self.stored.whole("g_idx").long()
        size = self.how.group_size
        return torch.arange(self.shape[1]) // (self.shape[1] if size == -1 else size)

    def _gptq(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return values [in, rows] and zeros [groups, rows]."""
        bits, most = self.how.bits, 2**self.how.bits - 1
        values = unpack(self.stored.columns("qweight", start, stop), bits).transpose(1, 2).flatten(0, 1)
        stored = unpack(self.stored.whole("qzeros"), bits).flatten(1)
        # The zero point of symmetric weights is the middle, whatever version the config states: some tools wrote
        # version 2 and stated version 1.
        offset = 0 if self.how.symmetric and bool((stored == 2 ** (bits - 1)).all()) else self.how.zero_offset
        return values, (stored[:, start:stop] + offset) & most

    def _awq(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        first, last = start // 8, -(-stop // 8)
        cut = slice(start - 8 * first, stop - 8 * first)
        values, zeros = (
            unpack(self.stored.columns(part, first, last), 4)[..., AWQ_ORDER].flatten(1)[:, cut]
            for part in ("qweight", "qzeros")
        )
        return values, zeros


def packed(stored: Stored, how: Quantisation) -> RowwiseWeight | None:
    """Return the weight, None if the module is not quantised. Raises UsageError if its tensors do not match."""
    if not stored.parts:
        return None
    rows, columns = stored.matrix("qweight", "I32")
    per, gptq = 32 // how.bits, how.method == "gptq"
    inputs, outputs = (rows * per, columns) if gptq else (rows, columns * per)
    groups = 1 if how.group_size == -1 else -(-inputs // how.group_size)
    stored.check("qzeros", (groups, outputs // per), kinds=("I32",))
    stored.check("scales", (groups, outputs))
    if "g_idx" in stored:
        stored.check("g_idx", (inputs,), kinds=("I32", "I64"))
        named = stored.whole("g_idx")
        if not 0 <= int(named.min()) <= int(named.max()) < groups:
            raise stored.damaged("g_idx", f"it names group {int(named.max())}, and there are {groups}")
    return Packed(stored, how, (outputs, inputs))
