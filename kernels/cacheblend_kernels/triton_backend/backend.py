"""The Triton backend: every kernel of the interface on an NVIDIA GPU of compute capability 8.0 or newer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cacheblend_kernels.interface import (
    AttentionMetadata,
    AttentionParams,
    KernelBackend,
    KernelError,
    LayerCache,
    Slots,
    StoredKV,
)
from cacheblend_kernels.triton_backend import cache_ops, deviation, norms
from cacheblend_kernels.triton_backend.checks import interpreted
from cacheblend_kernels.triton_backend.configs import DENSE_ROUTES, DenseRoute, LaunchPlan, arch_of
from cacheblend_kernels.triton_backend.decode_attention import decode_attention
from cacheblend_kernels.triton_backend.dense import is_full, sdpa_prefill
from cacheblend_kernels.triton_backend.load_kv import load_kv
from cacheblend_kernels.triton_backend.prefill_attention import prefill_attention
from cacheblend_kernels.triton_backend.warm_up import warm_up_attention

MINIMUM_CAPABILITY = (8, 0)


class TritonBackend(KernelBackend):
    """Kernels for one device. In Triton's interpreter (TRITON_INTERPRET=1) the same code runs on CPU tensors. arch,
    num_sms: target of the launch plans, read from the device unless given. dense: full prefills that torch computes."""

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        *,
        arch: int | None = None,
        num_sms: int | None = None,
        dense: Mapping[tuple[int, int], DenseRoute] = DENSE_ROUTES,
    ) -> None:
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < MINIMUM_CAPABILITY:
                raise KernelError(
                    f"the GPU has compute capability {capability[0]}.{capability[1]}; the {self.name} backend needs 8.0",
                    "use --attention-backend torch",
                )
            properties = torch.cuda.get_device_properties(device)
            arch, num_sms = arch or arch_of(capability), num_sms or properties.multi_processor_count
        elif not interpreted():
            raise KernelError(
                f"the {self.name} backend needs a CUDA device, not {device}", "use --attention-backend torch"
            )
        self.device = device
        self._plan, self._dense = LaunchPlan(arch or 90, num_sms or 132), dense

    def prefill_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        route = self._dense.get((self._plan.arch, q.shape[2]))
        if route is not None and q.shape[0] >= route.least_rows and params.plain and is_full(q, cache, meta):
            return sdpa_prefill(q, cache, meta.contiguous_slot, params.scale, route.kernel)
        return prefill_attention(q, cache, meta, params, self._plan)

    def decode_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        if q.shape[0] == meta.num_seqs:
            return decode_attention(q, cache, meta, params, self._plan)
        out = torch.zeros_like(q)  # rows after those of the sequences are padding
        out[: meta.num_seqs] = decode_attention(q[: meta.num_seqs], cache, meta, params, self._plan)
        return out

    def rope_and_cache(self, q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots) -> Tensor | None:
        return cache_ops.rope_and_cache(q, k, v, cache, slots)

    def load_kv(self, stored: StoredKV, cache: LayerCache, slots: Slots) -> None:
        load_kv(stored, cache, slots)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return cache_ops.rope(x, cos, sin)

    def kv_deviation(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, kind: str = "kv") -> Tensor:
        return deviation.kv_deviation(k, v, cache, slots, kind)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norms.add_rms_norm(x, residual, weight, eps)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return norms.act_and_mul(gate_up, activation)

    def warm_up(self, q: Tensor, cache: LayerCache, params: AttentionParams, max_keys: int) -> None:
        warm_up_attention(q, cache, params, max_keys, self._plan)
