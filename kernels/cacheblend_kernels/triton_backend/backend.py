"""The Triton backend: every kernel of the interface on an NVIDIA GPU of compute capability 8.0 or newer."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, KernelBackend, KernelError
from cacheblend_kernels.triton_backend import cache_ops, deviation, norms
from cacheblend_kernels.triton_backend.checks import interpreted
from cacheblend_kernels.triton_backend.configs import arch_of
from cacheblend_kernels.triton_backend.decode_attention import decode_attention
from cacheblend_kernels.triton_backend.load_kv import load_kv
from cacheblend_kernels.triton_backend.prefill_attention import prefill_attention

MINIMUM_CAPABILITY = (8, 0)


class TritonBackend(KernelBackend):
    """Kernels for one device. In Triton's interpreter (TRITON_INTERPRET=1) the same code runs on CPU tensors.

    arch, num_sms: what launches are planned for; read off the device unless given.
    """

    name = "triton"

    def __init__(self, device: torch.device, *, arch: int | None = None, num_sms: int | None = None) -> None:
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
        self.arch, self.num_sms = arch or 90, num_sms or 132
        self._addresses: dict[tuple[int, ...], Tensor] = {}

    def prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        return prefill_attention(
            q,
            k_cache,
            v_cache,
            meta,
            scale=scale,
            arch=self.arch,
            num_sms=self.num_sms,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        contiguous_slot: int = -1,
        max_kv_len: int = 0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        return decode_attention(
            q,
            k_cache,
            v_cache,
            block_table,
            kv_lens,
            scale=scale,
            num_sms=self.num_sms,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            contiguous_slot=contiguous_slot,
            max_kv_len=max_kv_len,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def rope_and_cache(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor | None:
        return cache_ops.rope_and_cache(
            q, k, v, cos, sin, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale
        )

    def load_kv(
        self,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        first_slot: int = -1,
        k_zero: Tensor | None = None,
        v_zero: Tensor | None = None,
        group_size: int = 32,
        pool_k_scale: Tensor | None = None,
        pool_v_scale: Tensor | None = None,
    ) -> None:
        load_kv(
            k,
            v,
            cos,
            sin,
            k_cache,
            v_cache,
            slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
            k_zero=k_zero,
            v_zero=v_zero,
            group_size=group_size,
            first_slot=first_slot,
            pool_k_scale=pool_k_scale,
            pool_v_scale=pool_v_scale,
        )

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return cache_ops.rope(x, cos, sin)

    def kv_deviation(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        kind: str = "kv",
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        return deviation.kv_deviation(k, v, k_cache, v_cache, slot_mapping, kind=kind, k_scale=k_scale, v_scale=v_scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norms.add_rms_norm(x, residual, weight, eps)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return norms.act_and_mul(gate_up, activation)

    def copy_blocks(self, pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
        """One launch for all pools, whose addresses are kept on the device."""
        if not pools:
            return
        pointers = tuple(pool.data_ptr() for pool in pools)
        if pointers not in self._addresses:
            self._addresses = {pointers: torch.tensor(pointers, dtype=torch.int64, device=src.device)}
        cache_ops.copy_blocks(pools, src, dst, self._addresses[pointers])
