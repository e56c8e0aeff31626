"""Hand-over to transformers: a prompt and its KV as arguments of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cacheblend_cli.kv.export import KVReader
from cacheblend_cli.types import Answer

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class CachedLayer:
    """K and V of all tokens but the last, each [1, num_kv_heads, num_tokens - 1, head_dim] on the host."""

    k: Tensor
    v: Tensor
    window: int | None  # positions that the layer's attention covers, None for all


class TransformersConnector:
    """Keeps a prompt's KV on the host."""

    def __init__(self) -> None:
        self.layers: list[CachedLayer] = []

    def hand_over(self, token_ids: Sequence[int], kv: KVReader) -> None:
        assert kv.start == 0, "nothing is given back before an answer begins"
        self.layers = [CachedLayer(_host(layer.k[:-1]), _host(layer.v[:-1]), layer.window) for layer in kv]


@dataclass(frozen=True)
class PrefilledPrompt:
    """A prompt with its KV. `model.generate(**prompt.inputs())` continues it without a prefill."""

    token_ids: tuple[int, ...]
    layers: Sequence[CachedLayer]
    report: Answer  # without text: which chunks were reused, timing, notes
    path: Path  # checkpoint, whose config says which layers have a window

    @property
    def input_ids(self) -> Tensor:
        """The whole prompt, [1, num_tokens] int64."""
        return torch.tensor([self.token_ids])

    def cache(self, model: PreTrainedModel | None = None) -> DynamicCache:
        """Return a new cache of all tokens but the last, whose logits `generate` computes. It grows with the answer, so
        each answer needs its own. model: the generating model, whose config, device and dtype are used; None: the
        engine's config and dtype, on the CPU."""
        from transformers import AutoConfig, DynamicCache
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        config: Any = AutoConfig.from_pretrained(self.path, local_files_only=True) if model is None else model.config
        cache = DynamicCache(config=config)
        for index, layer in enumerate(self.layers):
            if layer.window is None and isinstance(cache.layers[index], DynamicSlidingWindowLayer):
                cache.layers[index] = DynamicLayer()  # a config may have a window that the model does not use
            k, v = layer.k, layer.v
            if model is not None:
                k, v = (x.to(model.device, model.dtype) for x in (k, v))
            cache.update(k, v, index)
        return cache

    def inputs(self, model: PreTrainedModel | None = None) -> dict[str, Any]:
        """Return the arguments of `generate`, with a new cache. model: as for `cache`."""
        ids = self.input_ids if model is None else self.input_ids.to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": self.cache(model)}


def _host(heads: Tensor) -> Tensor:
    """Copy [n, num_kv_heads, head_dim] to the host as [1, num_kv_heads, n, head_dim]."""
    copied = heads.transpose(0, 1)[None].to("cpu", copy=True)
    return copied.contiguous()
