"""States of recurrent layers, which stand in the place of K and V (`generic.recurrent`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from cacheblend_store.format.blobs import PLAIN
from torch import Tensor

LayerState = Mapping[str, Tensor]
"""A layer's state by name, each [1, ...]: the last inputs of a convolution, and what a scan carries. Empty before the
first token. Its tensors are never written to."""
SequenceState = tuple[LayerState, ...]
"""States of all recurrent layers of a model, after a token of a sequence."""


@dataclass
class LaunchStates:
    """States of the sequences of one launch: before their rows, and after them, layer by layer."""

    counts: Sequence[int]  # rows of each sequence
    before: Sequence[SequenceState]
    decode: bool = False  # one row per sequence, none of them its first
    after: list[list[LayerState]] = field(default_factory=list)  # per layer, of each sequence

    def final(self) -> list[SequenceState]:
        """Return the states after the launch, by sequence."""
        return list(zip(*self.after, strict=True))


Recurrence = Callable[[Tensor, LaunchStates], Tensor]
"""Consecutive layers without K and V (`generic.recurrent.RecurrentLayers`): hidden states, and the launch's states."""


class StateTensor(NamedTuple):
    layer: int  # among the recurrent layers
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateLayout:
    """Tensors of a model's state, in the order in which they are stored."""

    num_layers: int
    tensors: tuple[StateTensor, ...]

    @classmethod
    def of(cls, state: SequenceState) -> StateLayout:
        found = [(i, name, layer[name]) for i, layer in enumerate(state) for name in sorted(layer)]
        return cls(len(state), tuple(StateTensor(i, name, t.dtype, tuple(t.shape)) for i, name, t in found))

    @property
    def initial(self) -> SequenceState:
        """The state before the first token."""
        return ({},) * self.num_layers

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in self.tensors)

    @property
    def stored(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Dtype and shape of each tensor, as in a chunk's record."""
        return tuple((PLAIN[str(t.dtype).removeprefix("torch.")], t.shape) for t in self.tensors)

    def to_bytes(self, state: SequenceState) -> list[bytes]:
        """Return the data of each tensor."""
        held = (state[t.layer][t.name].cpu().contiguous() for t in self.tensors)
        return [t.view(torch.uint8).numpy().tobytes() for t in held]

    def from_bytes(self, data: Sequence[memoryview], device: torch.device) -> SequenceState:
        """Return the state with this data, one buffer a tensor."""
        layers = [dict[str, Tensor]() for _ in range(self.num_layers)]
        for t, own in zip(self.tensors, data, strict=True):
            layers[t.layer][t.name] = torch.frombuffer(own, dtype=t.dtype).view(t.shape).to(device)
        return tuple(layers)
