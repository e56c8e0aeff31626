"""Attention, KV-cache and norm kernels behind one typed interface, with torch, Triton and xformers backends."""

from cacheblend_kernels.interface import AttentionMetadata, KernelBackend, KernelError
from cacheblend_kernels.registry import BACKENDS, select_backend

__all__ = ["BACKENDS", "AttentionMetadata", "KernelBackend", "KernelError", "select_backend"]
