"""A decoder with transformers' layers: the interface of `model.decoder` over whole layers that are called twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import AttentionParams, KernelBackend
from torch import Tensor, nn

from cacheblend_cli.errors import CacheBlendError, UsageError
from cacheblend_cli.model.adapter import LoraAdapter
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.families.generic import not_generic, quiet
from cacheblend_cli.model.generic import seam
from cacheblend_cli.model.generic.measure import layers_with_kv, measure
from cacheblend_cli.model.generic.parts import GenericModule, LayerCall, Parts
from cacheblend_cli.model.generic.recurrent import RecurrentLayers
from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.model.parallel import Shard
from cacheblend_cli.model.rope import LayerRotations
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.states import LaunchStates, SequenceState, StateLayout
from cacheblend_cli.model.weights import head_order


class GenericLayer(DecoderLayer):
    """A layer of transformers. Its norms are inside, so h and the residual are both the layer's raw input. K has the
    channels of its heads in our kernels' order, like all stored K."""

    def __init__(
        self, index: int, spec: ModelSpec, kernels: KernelBackend, module: GenericModule, attention: AttentionParams, rope: int
    ) -> None:  # fmt: skip
        self.index, self.spec, self.kernels, self.rope, self.attention = index, spec, kernels, rope, attention
        self.module, self.part = module, Shard(spec)
        order = head_order(spec)
        self._order = None if order is None else torch.tensor(order)

    def project_qkv(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.module.project(h)
        return self._ordered(found.q, h), self._ordered(found.k, h), found.v.to(h.dtype).contiguous()

    def project_q(self, h: Tensor) -> Tensor:
        return self._ordered(self.module.project(h).q, h)

    def project_kv(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.project_qkv(h)[1:]

    own_kv = True

    def finish(self, attended: Tensor, residual: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output = self.module.finish(residual, attended)
        return output, output

    def in_float32(self, call: LayerCall) -> GenericLayer:
        """Return a copy that computes in fp32. call: from `Parts.calls`, in fp32."""
        return GenericLayer(
            self.index, self.spec, self.kernels, self.module.in_float32(call), self.attention, self.rope
        )

    def _ordered(self, heads: Tensor, h: Tensor) -> Tensor:
        """Reorder each head's dimensions to ours, in the rows' dtype: some models keep a part of a layer in fp32."""
        heads = heads.to(h.dtype)
        if self._order is None:
            return heads.contiguous()
        self._order = self._order.to(h.device)
        return heads.index_select(-1, self._order)


class GenericDecoder(Decoder):
    """A decoder over transformers' layers.

    model: a ...ForCausalLM of transformers, owned by the decoder from here on. Raises UsageError, with the reason, if
    it cannot be used. `kv.generic_check` finds out whether the results equal transformers'.
    """

    def __init__(self, spec: ModelSpec, model: object, kernels: KernelBackend) -> None:
        self.parts = Parts(model)
        self.device, self.dtype = self.parts.model.device, self.parts.model.dtype
        with torch.inference_mode():
            found = measure(spec, self.parts)
        self.spec, self.kernels, self.part = found.spec, kernels, Shard(found.spec)
        self.rope = LayerRotations(self.spec, self.device)
        each = zip(found.modules, found.attention, self.rope.of_layer, strict=True)
        self.generic_layers = [GenericLayer(i, self.spec, kernels, *parts) for i, parts in enumerate(each)]
        self.layers = [*self.generic_layers]
        self.recurrent_modules: list[tuple[int, GenericModule]] = []  # index in the model, layer without K and V
        if found.recurrent:
            with torch.inference_mode():
                self._add_recurrent(found.recurrent, found.initial)
        self.kv_scales: KVScales | None = None
        names = (name.rpartition(".")[2] for name, _ in self.parts.model.named_modules())
        self.steady = "experts" not in names  # transformers multiplies each expert with only its rows

    def _add_recurrent(self, groups: list[RecurrentLayers], rows: Tensor) -> None:
        """Put layers without K and V before the layer that follows them. rows: to find out what states they keep,
        and to call each of their functions once, since some print a message then."""
        state: SequenceState = ({},) * sum(self.spec.recurrent)
        for part in (rows, rows[:1]):
            states = LaunchStates([len(part)], [state], decode=len(part) == 1)
            for group in groups:
                group(part, states)
            [state] = states.final()
        self.state_layout = StateLayout.of(state)
        for layer, group in zip(self.layers, groups, strict=False):
            layer.before = group if group.modules else None
        self.after = groups[-1] if groups[-1].modules else None
        each = (module for group in groups for module in group.modules)
        without_kv = sorted({*range(len(self.parts.layers))} - {*layers_with_kv(self.spec)})
        self.recurrent_modules = list(zip(without_kv, each, strict=True))

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.parts.embed(token_ids)

    def input_norm(self, layer: DecoderLayer, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return delta, delta

    def logits(self, delta: Tensor, residual: Tensor) -> Tensor:
        return self.parts.logits(delta).float()

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parts.model.parameters())


def load_generic(
    spec: ModelSpec,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelBackend,
    adapter: LoraAdapter | None = None,
) -> GenericDecoder:
    """Load the checkpoint in `path` with the adapter merged into it, on transformers' own layers. Nothing is fetched,
    and the model's own code is never run. Raises UsageError, with the reason, for a model that cannot be used."""
    seam.register()
    model_type = spec.config["model_type"]
    try:
        model = _model(path, dtype, device, adapter)
        with quiet():
            return GenericDecoder(spec, model, kernels)
    except (CacheBlendError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # unsupported layers can raise anything
        raise not_generic(model_type, str(error).partition("\n")[0] or type(error).__name__) from error


def _model(path: Path, dtype: torch.dtype, device: torch.device, adapter: LoraAdapter | None) -> object:
    from transformers import AutoModelForCausalLM

    with quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", local_files_only=True, trust_remote_code=False,
            use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    model, found = loaded
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if odd := sorted(key if isinstance(key, str) else key[0] for key in found[kind]):  # (key, shape, shape)
            raise UsageError(
                f"{path} has {len(odd)} {kind.replace('_keys', '')} weights (first: {odd[0]})",
                "fetch the checkpoint again",
            )
    if adapter is not None:
        merge_adapter(model, adapter)
    model = model.eval().requires_grad_(False).to(device)
    model.set_attn_implementation(seam.NAME)
    return model


BLOCK = 1024  # rows per block, which are temporarily fp32


def merge_adapter(model: Any, adapter: LoraAdapter) -> None:
    """Merge an adapter into a ...ForCausalLM. Raises UsageError for an adapter of another model, or one that changes
    anything but linear layers with their own weights."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    shared = head is not None and head.weight is model.get_input_embeddings().weight
    for name, delta in adapter.deltas.items():
        module = modules.get(name, modules.get(name.removeprefix("model.")))
        if module is None:
            raise adapter.misplaced(name, "which the model does not have")
        if not isinstance(module, nn.Linear) or (module is head and shared):
            raise adapter.misplaced(name, "and that is not a linear layer with weights of its own")
        adapter.check_shape(name, module.weight.shape)
        with torch.no_grad():
            for start in range(0, len(module.weight), BLOCK):
                rows = module.weight[start : start + BLOCK]
                rows.copy_(rows.float() + delta.rows(start, start + len(rows)))
