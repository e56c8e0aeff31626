"""Attention, KV-cache and norm kernels behind one typed interface, and its torch backend."""

from cacheblend_kernels.interface import (
    AttentionMetadata,
    AttentionParams,
    KernelBackend,
    KernelError,
    LatentHeads,
    LayerCache,
    Regressed,
    RegressionPrior,
    Slots,
    StagedChunk,
    StagedTensor,
    StoredKV,
    StoredLayers,
    layers_table,
)  # fmt: skip
from cacheblend_kernels.registry import BACKENDS, fallback_reason, missing_for, select_backend
from cacheblend_kernels.row_table import RowTable

__all__ = [
    "BACKENDS", "AttentionMetadata", "AttentionParams", "KernelBackend", "KernelError", "LatentHeads", "LayerCache",
    "Regressed", "RegressionPrior", "RowTable", "Slots", "StagedChunk", "StagedTensor", "StoredKV", "StoredLayers",
    "fallback_reason", "layers_table", "missing_for", "select_backend",
]  # fmt: skip
