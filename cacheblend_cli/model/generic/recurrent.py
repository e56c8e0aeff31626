"""Layers with a recurrent state in place of K and V: gated DeltaNet (arXiv 2412.06464), Mamba 2 (arXiv 2405.21060), and
short convolutions.

Such a layer is transformers' own module. It reads rows of a sequence in order, finds its state in the cache that it is
given, and leaves the state after them there. So all a layer needs is the state before its rows. Layers of a hybrid
without any state (an MLP or experts alone) are the same, with nothing in their state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cacheblend_cli.model.generic.parts import GenericModule
from cacheblend_cli.model.states import LaunchStates, LayerState


class RecurrentLayers:
    """Consecutive layers without K and V. first: number of the first one among these layers of the model."""

    def __init__(self, first: int, modules: Sequence[GenericModule]) -> None:
        self.modules, self._first = modules, first

    def __call__(self, hidden: Tensor, states: LaunchStates) -> Tensor:
        """Compute all of them. hidden: [num_rows, hidden_size], with more rows than sequences if a decode step is
        padded."""
        for number, module in enumerate(self.modules, self._first):
            before = [state[number] for state in states.before]
            if states.decode:
                hidden, after = _decoded(module, hidden, before)
            else:
                hidden, after = _prefilled(module, hidden, before, states.counts)
            states.after.append(after)
        return hidden


def _prefilled(
    module: GenericModule, hidden: Tensor, before: Sequence[LayerState], counts: Sequence[int]
) -> tuple[Tensor, list[LayerState]]:
    outputs, after = [], list[LayerState]()
    for rows, state in zip(hidden.split(list(counts)), before, strict=True):
        held = _Held({name: tensor.clone() for name, tensor in state.items()})
        outputs.append(module.recur(rows[None], held)[0])
        after.append(held.states)
    return torch.cat(outputs), after


def _decoded(module: GenericModule, hidden: Tensor, before: Sequence[LayerState]) -> tuple[Tensor, list[LayerState]]:
    """Compute all sequences at once. The states of padding are copies of the first one's, and are dropped."""
    each = [*before, *[before[0]] * (len(hidden) - len(before))]
    held = _Held({name: torch.cat([state[name] for state in each]) for name in before[0]})
    output = module.recur(hidden[:, None], held)[:, 0]
    return output, [{name: t[i : i + 1] for name, t in held.states.items()} for i in range(len(before))]


class _Held:
    """A layer's part of transformers' `Cache`, as its recurrent modules use it. They may write to the tensors."""

    def __init__(self, states: LayerState) -> None:
        self.states = dict(states)

    @property
    def layers(self) -> Mapping[int, SimpleNamespace]:
        """What modules of transformers before 5.21 read, at any index."""
        states = {"conv_states": [self.get_conv_state(0)], "recurrent_states": [self.get_recurrent_state(0)]}
        return defaultdict(lambda: SimpleNamespace(record_past=False, **states))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return f"conv{state_idx}" in self.states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent{state_idx}")

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **named: Any
    ) -> Tensor:
        """Append columns [batch, channels, num_rows]. Returns all that the convolution reads."""
        name, whole = f"conv{state_idx}", conv_states
        if name in self.states:
            conv_kernel_size = self.states[name].shape[-1]
            whole = torch.cat([self.states[name], conv_states], -1)
        assert conv_kernel_size is not None
        whole = torch.nn.functional.pad(whole, (max(0, conv_kernel_size - whole.shape[-1]), 0))
        self.states[name] = whole[..., -conv_kernel_size:].clone()
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> Tensor:
        self.states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states
