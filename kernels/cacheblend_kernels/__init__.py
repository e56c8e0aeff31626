"""Attention, KV-cache and norm kernels behind one typed interface, and its torch backend."""

from cacheblend_kernels.interface import AttentionMetadata, KernelBackend, KernelError
from cacheblend_kernels.registry import BACKENDS, missing_for, select_backend

__all__ = ["BACKENDS", "AttentionMetadata", "KernelBackend", "KernelError", "missing_for", "select_backend"]
