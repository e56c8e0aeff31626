"""A KVConnectorBase_V1 that loads handed-over prompts, and saves nothing.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "CacheBlendConnector", "kv_role": "kv_consumer",
    "kv_connector_module_path": "cacheblend_vllm.connector", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"directory": "/dev/shm/cacheblend"}}'
"""

from __future__ import annotations

import logging
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from cacheblend_vllm.handover import HandOver, HandOverSource

logger = logging.getLogger("vllm.cacheblend")
_LAYER = re.compile(r"\.layers?\.(\d+)\.")
_THREADS = 4  # that read hand-overs, one each


@dataclass(frozen=True)
class Load:
    """Positions start:end of a hand-over to load."""

    request_id: str
    hand_over: HandOver
    start: int
    end: int
    block_ids: tuple[list[int], ...]  # vLLM's blocks of the request, per KV cache group


@dataclass
class Loads(KVConnectorMetadata):
    """Loads that the worker starts in a step."""

    loads: list[Load] = field(default_factory=list)


@dataclass(frozen=True)
class Fetched:
    """K and V of one attention layer for slots [n] of the paged cache: [n, num_kv_heads, head_dim], heads of this
    rank."""

    layer: Any
    k: Tensor
    v: Tensor
    slots: Tensor


class CacheBlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Requests whose kv_transfer_params name a hand-over start with its KV. Other requests are unaffected.

    The scheduler side returns how many tokens can be loaded, again after a preemption. The worker side reads in its own
    threads while others decode, and writes between two steps, by the attention implementation's own update, so that
    vLLM determines the layout. A request whose hand-over cannot be read is reported: with kv_load_failure_policy
    "recompute" vLLM computes its prompt.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._place = HandOverSource(extra("directory", None), extra("url", None))
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._groups = [(g.layer_names, g.kv_cache_spec.block_size) for g in kv_cache_config.kv_cache_groups]
        self._found: dict[str, tuple[HandOver, int]] = {}
        self._loads: list[Load] = []
        self._failed: set[str] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "cacheblend-load")
        self._fetching: dict[str, tuple[Load, Future[list[Fetched]]]] = {}

    # scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        hand_over = HandOver.of(request.kv_transfer_params)
        if hand_over is None or request.request_id in self._failed:
            return 0, False
        if not hand_over.is_of(request.prompt_token_ids) or not self._place.has(hand_over.id):
            return 0, False
        # the last token is always computed: its logits are wanted. After a preemption the answer so far follows the
        # prompt
        end = min(hand_over.num_tokens, request.num_tokens - 1)
        if end <= num_computed_tokens:
            return 0, False
        self._found[request.request_id] = hand_over, num_computed_tokens
        return end - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        found = self._found.pop(request.request_id, None)
        if found is not None and num_external_tokens > 0:
            hand_over, start = found
            end = start + num_external_tokens
            self._loads.append(Load(request.request_id, hand_over, start, end, blocks.get_block_ids()))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = Loads(self._loads), []
        return loads

    def update_connector_output(self, connector_output: Any) -> None:
        """Failed requests are not tried again but computed."""
        self._failed |= connector_output.failed_recving or set()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._found.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            self._fetching[load.request_id] = load, self._threads.submit(self._fetch, load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Write what has been read since the last step."""
        results = KVConnectorTransferResults()
        for request_id, (load, reading) in list(self._fetching.items()):
            if not reading.done():
                continue
            del self._fetching[request_id]
            results.finished_recving.add(request_id)
            name = load.hand_over.id[:8]
            try:
                for fetched in reading.result():
                    self._write(fetched)
                logger.info("hand-over %s: %d tokens loaded", name, load.end - load.start)
            except Exception as error:
                logger.warning("hand-over %s cannot be loaded: %s: %s", name, type(error).__name__, error)
                results.failed_recving.add(request_id)
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs after it is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: no KV is handed back."""

    def wait_for_save(self) -> None:
        """Do nothing: no KV is handed back."""

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, load: Load) -> list[Fetched]:
        """Read the KV of this rank's layers. Raises OSError or HandOverError."""
        file, fetched = self._place.open(load.hand_over), list[Fetched]()
        for group, (names, _) in enumerate(self._groups):
            positions, slots = self._slots(load, group)
            for name in names if len(positions) else ():
                number, layer = _LAYER.search(f".{name}"), self._layers[name]
                if number is None:
                    raise LookupError(f"{name} is not a layer of a decoder")
                first, last = int(positions[0]), int(positions[-1])
                k, v = (
                    heads_of_rank(x, layer.num_kv_heads)[positions - first]
                    for x in file.read(int(number[1]), first, last + 1)
                )
                fetched.append(Fetched(layer, k, v, slots))
        return fetched

    def _slots(self, load: Load, group: int) -> tuple[Tensor, Tensor]:
        """Return the positions that the group keeps, and their slots. Blocks behind a sliding window are vLLM's null
        block, 0."""
        block_size = self._groups[group][1]
        positions = torch.arange(load.start, load.end)
        blocks = torch.tensor(load.block_ids[group])[positions // block_size]
        kept = blocks != 0
        return positions[kept], (blocks * block_size + positions % block_size)[kept]

    def _write(self, fetched: Fetched) -> None:
        layer, cache = fetched.layer, fetched.layer.kv_cache
        k, v = (x.to(cache.device, self._dtype).contiguous() for x in (fetched.k, fetched.v))
        layer.impl.do_kv_cache_update(layer, k, v, cache, fetched.slots.to(cache.device))


def heads_of_rank(heads: Tensor, count: int) -> Tensor:
    """Return the `count` KV heads of this tensor-parallel rank, from [n, num_kv_heads, head_dim]. With fewer heads than
    ranks, neighbouring ranks have the same head."""
    total = heads.shape[1]
    if count == total:
        return heads
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    first = get_tensor_model_parallel_rank() * total // get_tensor_model_parallel_world_size()
    return heads[:, first : first + count]
