"""A model of transformers, split before and after its layers, and its layers as callables."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.generic import not_generic
from cacheblend_cli.model.generic import seam
from cacheblend_cli.model.generic.seam import NAME, Projected

ABSENT = ("attention_mask", "position_ids", "cache_position", "past_key_values", "past_key_value")
"""Arguments of a layer, besides rows and RoPE, that only masks and caches need. They are omitted on our path."""
_VARYING = ("hidden_states", "position_embeddings")
LayerCall = dict[str, Any]


class Parts:
    """The parts of a model. model: a ...ForCausalLM with the attention implementation `seam.NAME`."""

    def __init__(self, model: Any) -> None:
        self.model, self.model_type = model, model.config.model_type
        self._base = model.base_model
        count = model.config.num_hidden_layers
        lists = [n for n, m in self._base.named_children() if isinstance(m, nn.ModuleList) and len(m) == count]
        if len(lists) != 1 or self._base is model:
            raise self.refused("its layers are not found in one list")
        self._name = lists[0]
        self.layers: list[nn.Module] = list(getattr(self._base, self._name))

    def refused(self, reason: str) -> UsageError:
        return not_generic(self.model_type, reason)

    def embed(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the input of the first layer: [num_rows] int64 -> [num_rows, hidden_size]."""

        def stop(call: LayerCall) -> Tensor:
            raise _Reached(call)

        places = None if positions is None else positions[None]
        try:
            with self._edges(stop):
                self._base(input_ids=token_ids[None], position_ids=places, use_cache=False)
        except _Reached as reached:
            return reached.call["hidden_states"][0]
        raise self.refused("its layers are not called by its own forward pass")

    def calls(self, embedded: Tensor, positions: Tensor, implementation: str = NAME) -> list[LayerCall]:
        """Return each layer's keyword arguments at these positions [num_rows] int64. embedded: [num_rows, hidden_size];
        its values do not matter, but RoPE and masks get its dtype."""
        found: list[LayerCall] = []

        def keep(call: LayerCall) -> Tensor:
            found.append(call)
            return call["hidden_states"]

        with self.attention(implementation), self._edges(keep), self._surroundings_in(embedded.dtype):
            ones = torch.ones(1, len(positions), dtype=torch.int64, device=positions.device)  # no packed sequences
            self._base(inputs_embeds=embedded[None], position_ids=positions[None], attention_mask=ones, use_cache=False)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits: [num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        with self._edges(lambda call: hidden[None]):
            return self.model(input_ids=ids, use_cache=False).logits[0]

    @contextmanager
    def attention(self, implementation: str) -> Iterator[None]:
        """Use transformers' own attention temporarily."""
        self.model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            self.model.set_attn_implementation(NAME)

    @contextmanager
    def _surroundings_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Keep the weights outside the layers, except embeddings, in another dtype temporarily: a LayerNorm only
        accepts rows of its own dtype."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        outside = [m for m in self._base.modules() if id(m) not in inside and not isinstance(m, nn.Embedding)]
        held = [(p, p.data) for m in outside for p in m.parameters(recurse=False) if p.is_floating_point()]
        try:
            for parameter, data in held:
                parameter.data = data.to(dtype)
            yield
        finally:
            for parameter, data in held:
                parameter.data = data

    @contextmanager
    def _edges(self, act: Callable[[LayerCall], Tensor]) -> Iterator[None]:
        """Replace every layer by `act` temporarily."""
        setattr(self._base, self._name, nn.ModuleList(_Edge(layer, act) for layer in self.layers))
        try:
            yield
        finally:
            setattr(self._base, self._name, nn.ModuleList(self.layers))


class GenericModule:
    """A layer of transformers as a function of rows [num_rows, hidden_size]. call: the arguments its model passes."""

    def __init__(self, module: nn.Module, call: LayerCall) -> None:
        self.module = module
        self.rope = _rope_of(call)  # cos and sin as the model computes them; None: it has no RoPE
        self._same = {name: _neutral(name, value) for name, value in call.items() if name not in _VARYING}

    def project(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Projected:
        """Return q, k and v of the rows. turn: RoPE's cos and sin in the layer's shape [1, num_rows, ...]; None: q and
        k stay unrotated (cos 1, sin 0). Raises LookupError if the layer does not call attention."""
        try:
            self._run(hidden, turn)
        except seam.Stopped as stopped:
            if stopped.projected.q.shape[0] != hidden.shape[0]:
                raise ValueError("its attention has other rows than the layer") from None
            return stopped.projected
        raise LookupError

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output. attended: attention's output, [num_rows, num_heads, head_dim]."""
        with seam.giving(attended):
            return _output(self._run(hidden, None))[0]

    def whole(self, hidden: Tensor, call: LayerCall) -> Tensor:
        """Run the layer with its own attention, as its model does."""
        return _output(self.module(**(call | {"hidden_states": hidden[None]})))[0]

    def recur(self, hidden: Tensor, cache: object) -> Tensor:
        """Run a layer without attention: [batch, num_rows, hidden_size]. cache: see `recurrent`."""
        return _output(self.module(**(self._named(None) | {"hidden_states": hidden, "past_key_values": cache})))

    def in_float32(self, call: LayerCall) -> GenericModule:
        """Return a copy that computes in fp32, or itself if it already does. call: from `Parts.calls`, in fp32."""
        if all(p.dtype == torch.float32 for p in self.module.parameters()):
            return GenericModule(self.module, call)
        configs = {id(c): c for m in self.module.modules() if (c := getattr(m, "config", None)) is not None}
        return GenericModule(copy.deepcopy(self.module, configs).float(), call)

    def _run(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None) -> Any:
        if turn is None and self.rope is not None:
            width = self.rope[0].shape[-1]
            cos = hidden.new_ones(1, hidden.shape[0], width)
            turn = cos, torch.zeros_like(cos)
        return self.module(hidden_states=hidden[None], **self._named(turn))

    def _named(self, turn: tuple[Tensor, Tensor] | None) -> LayerCall:
        """Return the arguments besides the rows."""
        return self._same | ({} if self.rope is None else {"position_embeddings": turn})


class _Edge(nn.Module):
    """Placeholder for a layer; the model may read the layer's attributes."""

    def __init__(self, layer: nn.Module, act: Callable[[LayerCall], Tensor]) -> None:
        super().__init__()
        self.layer, self._act = layer, act

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *given: Any, **named: Any) -> Tensor | tuple[Tensor]:
        parameters = inspect.signature(self.layer.forward).parameters
        return self._act(dict(zip(parameters, given, strict=False)) | named)


class _Reached(Exception):
    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.call = call


def _rope_of(call: LayerCall) -> tuple[Tensor, Tensor] | None:
    turn: Any = call.get("position_embeddings")
    if turn is None:
        return None
    is_pair = isinstance(turn, tuple | list) and len(turn) == 2
    if not is_pair or not all(isinstance(t, Tensor) and t.is_floating_point() and t.ndim == 3 for t in turn):
        raise ValueError("its layers do not get RoPE as cos and sin")
    return turn[0], turn[1]


def _neutral(name: str, value: Any) -> Any:
    if name in ABSENT:
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"its layers are given {name}, which changes with the rows")


def _output(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned
