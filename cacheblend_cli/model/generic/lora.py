"""A LoRA adapter, merged into the weights that transformers holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.adapter import LoraAdapter

BLOCK = 1024  # rows at a time, which are fp32 for a moment


def merge_adapter(model: Any, adapter: LoraAdapter) -> None:
    """model: a ...ForCausalLM. Raises UsageError for an adapter of another model, or of what is no linear layer of its own."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    shared = head is not None and head.weight is model.get_input_embeddings().weight
    for name, delta in adapter.deltas.items():
        module = modules.get(name, modules.get(name.removeprefix("model.")))
        if not isinstance(module, nn.Linear) or (module is head and shared):
            what = (
                "which the model has not" if module is None else "and that is no linear layer with weights of its own"
            )
            raise UsageError(f"the adapter {adapter.path} changes {name}, {what}", "use another adapter or model")
        made, wanted = [delta.up.shape[0], delta.down.shape[1]], list(module.weight.shape)
        if made != wanted:
            raise UsageError(
                f"the adapter {adapter.path} changes {name} as if it were {made}, and it is {wanted}",
                "the adapter and the model do not belong together",
            )
        with torch.no_grad():
            for start in range(0, wanted[0], BLOCK):
                rows = module.weight[start : start + BLOCK]
                rows.copy_(rows.float() + delta.rows(start, start + len(rows)))
