"""A KVConnectorBase_V1 that loads handed-over prompts, and saves nothing.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "CacheBlendConnector", "kv_role": "kv_consumer",
    "kv_connector_module_path": "cacheblend_vllm.connector", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"directory": "/dev/shm/cacheblend"}}'
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from cacheblend_vllm.handover import HandOver, KVFile, Place

logger = logging.getLogger("vllm.cacheblend")
_LAYER = re.compile(r"\.layers?\.(\d+)\.")


@dataclass(frozen=True)
class Load:
    """Positions start to end of a hand-over, and vLLM's blocks of the request, a list for each KV cache group."""

    hand_over: HandOver
    start: int
    end: int
    block_ids: tuple[list[int], ...]


@dataclass
class Loads(KVConnectorMetadata):
    """What the worker loads before its next step."""

    loads: list[Load] = field(default_factory=list)


class CacheBlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Requests whose kv_transfer_params name a hand-over start with its KV. Every other request is left alone.

    Scheduler: says how many tokens can be loaded, again after a preemption. Worker: writes them into the paged cache before
    the step, by the attention implementation's own update, so that the layout is vLLM's business. A hand-over that cannot be
    read is reported block by block: with kv_load_failure_policy "recompute" vLLM computes them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._place = Place(extra("directory", None), extra("url", None))
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._groups = [(set(g.layer_names), g.kv_cache_spec.block_size) for g in kv_cache_config.kv_cache_groups]
        self._found: dict[str, tuple[HandOver, int]] = {}
        self._loads: list[Load] = []
        self._failed: set[int] = set()

    # scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        hand_over = HandOver.of(request.kv_transfer_params)
        if hand_over is None or not hand_over.is_of(request.prompt_token_ids) or not self._place.has(hand_over.id):
            return 0, False
        # the last token is always computed: its logits are wanted. After a preemption the answer so far follows the prompt
        end = min(hand_over.num_tokens, request.num_tokens - 1)
        if end <= num_computed_tokens:
            return 0, False
        self._found[request.request_id] = hand_over, num_computed_tokens
        return end - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        found = self._found.pop(request.request_id, None)
        if found is not None and num_external_tokens > 0:
            hand_over, start = found
            self._loads.append(Load(hand_over, start, start + num_external_tokens, blocks.get_block_ids()))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = Loads(self._loads), []
        return loads

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._found.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            try:
                self._load(load, forward_context.no_compile_layers)
            except Exception as error:
                logger.warning(
                    "hand-over %s cannot be loaded: %s: %s", load.hand_over.id[:8], type(error).__name__, error
                )
                self._failed.update(self._blocks(load))
            else:
                logger.info("hand-over %s: %d tokens loaded", load.hand_over.id[:8], load.end - load.start)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is handed back."""

    def wait_for_save(self) -> None:
        """Nothing is handed back."""

    def _load(self, load: Load, layers: dict[str, Any]) -> None:
        file, slots = self._place.open(load.hand_over), [self._slots(load, group) for group in range(len(self._groups))]
        for name, layer in layers.items():
            group = next((i for i, (names, _) in enumerate(self._groups) if name in names), None)
            number = _LAYER.search(f".{name}")
            if group is None or number is None:
                continue
            rows, slot_mapping = slots[group]
            if len(rows):
                _write(layer, file, int(number[1]), (load.start, load.end), rows, slot_mapping, self._dtype)

    def _slots(self, load: Load, group: int) -> tuple[Tensor, Tensor]:
        """Which rows of the load the group keeps, and their slots: blocks behind a sliding window are vLLM's null block, 0."""
        block_size = self._groups[group][1]
        positions = torch.arange(load.start, load.end)
        blocks = torch.tensor(load.block_ids[group])[positions // block_size]
        rows = blocks.nonzero()[:, 0]
        return rows, blocks[rows] * block_size + positions[rows] % block_size

    def _blocks(self, load: Load) -> Iterable[int]:
        for (_, block_size), ids in zip(self._groups, load.block_ids, strict=True):
            yield from (i for i in ids[load.start // block_size : -(-load.end // block_size)] if i)


def _write(
    layer: Any, file: KVFile, number: int, span: Sequence[int], rows: Tensor, slots: Tensor, dtype: torch.dtype
) -> None:
    """Write one layer's rows of a span of positions to the slots."""
    cache = layer.kv_cache
    k, v = (heads_of_rank(x, layer.num_kv_heads)[rows].to(cache.device, dtype) for x in file.read(number, *span))
    layer.impl.do_kv_cache_update(layer, k.contiguous(), v.contiguous(), cache, slots.to(cache.device))


def heads_of_rank(heads: Tensor, count: int) -> Tensor:
    """The `count` KV heads that this tensor-parallel rank holds, of [n, num_kv_heads, head_dim]. With fewer heads than ranks
    each is replicated on neighbouring ranks."""
    total = heads.shape[1]
    if count == total:
        return heads
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    first = get_tensor_model_parallel_rank() * max(total, 1) // get_tensor_model_parallel_world_size()
    return heads[:, first : first + count]
