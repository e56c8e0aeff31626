"""Cost model: lower bounds on the time of a prefill's rows, of loading its KV, and of a decode step, given the device's
measured ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.types import LayerReport, LayerStatus


@dataclass(frozen=True)
class Ceilings:
    """flops: bf16 matrix product, 1/s; memory: device memory, bytes/s; bus: host to device, bytes/s."""

    flops: float
    memory: float
    bus: float

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Ceilings:
        return cls(
            measured["matmul_tflop_s"] * 1e12,
            measured["device_copy_gb_s"] * 1e9,
            measured["host_to_device_gb_s"] * 1e9,
        )


@dataclass(frozen=True)
class Work:
    """One prefill of num_tokens, of which the last `suffix` are always fresh. kv_bytes: bytes to load, of all layers.
    probed: layers whose attention the fresh rows record before tokens are chosen, () without a probe."""

    num_tokens: int
    suffix: int
    layers: Sequence[LayerReport]
    kv_bytes: int = 0
    probed: Sequence[int] = ()


def prefill_flops(spec: ModelSpec, work: Work) -> float:
    """Return the minimum flops of a prefill's layers, without head, norms and probe."""
    return sum(matmul + attention for matmul, attention, _ in _layers(spec, work.num_tokens, work.suffix, work.layers))


def prefill_floor(spec: ModelSpec, work: Work, ceilings: Ceilings) -> float:
    """Return seconds: matrix products of each layer, or reading its weights if it has few rows, and attention,
    overlapped with loading the KV.

    A probe comes first, and ends no sooner than the KV of its layers is loaded.
    """
    compute = sum(
        max(matmul / ceilings.flops, weights / ceilings.memory) + attention / ceilings.flops
        for matmul, attention, weights in _layers(spec, work.num_tokens, work.suffix, work.layers)
    )
    load, probe = work.kv_bytes / ceilings.bus, 0.0
    if work.probed:
        awaited = load * (max(work.probed) + 1) / spec.num_layers
        probe = max(probe_floor(spec, work, ceilings), awaited)
    return max(probe + compute, load)


def probe_floor(spec: ModelSpec, work: Work, ceilings: Ceilings) -> float:
    """Return seconds of the suffix's rows through the layers up to the last probed one (only queries, K and V there),
    and of their attention to all keys. Keys and weights are read once per layer, keys once more where attention is
    recorded."""
    last, rows, itemsize = max(work.probed), work.suffix, 2
    q_size, mlp = spec.hidden_size * spec.q_size, spec.mlp_params
    kv_size = 2 * spec.hidden_size * spec.kv_size
    keys = itemsize * spec.kv_size * work.num_tokens
    scores = 2.0 * spec.num_heads * spec.head_dim * rows * work.num_tokens
    seconds = 0.0
    for layer in range(last + 1):
        params = q_size + kv_size + (q_size + mlp if layer < last else 0)
        seconds += max(2.0 * rows * params / ceilings.flops, itemsize * params / ceilings.memory)
        if layer < last:
            seconds += max(2 * scores / ceilings.flops, 2 * keys / ceilings.memory)
        if layer in work.probed:
            seconds += max(scores / ceilings.flops, keys / ceilings.memory)
    return seconds


def decode_floor(spec: ModelSpec, weight_bytes: int, kv_len: float, itemsize: int, ceilings: Ceilings) -> float:
    """Return seconds of a step of one sequence: every weight and the KV of kv_len tokens are read once."""
    return (weight_bytes + kv_len * spec.kv_bytes_per_token(itemsize)) / ceilings.memory


def matmul_params(spec: ModelSpec) -> int:
    """Return the number of weights that every row of a prefill is multiplied with, without embeddings and output
    head."""
    return spec.num_layers * (spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size) + spec.mlp_params)


def decode_weight_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return bytes of the weights that a step reads: layers and head; one row of the embedding."""
    return itemsize * (matmul_params(spec) + spec.vocab_size * spec.hidden_size)


def _layers(
    spec: ModelSpec, num_tokens: int, suffix: int, layers: Sequence[LayerReport]
) -> list[tuple[float, float, float]]:
    """Return (flops of matrix products, flops of attention, bytes of 16-bit weights) of each layer.

    At layer 0 cached rows project no K and V; at a check layer all rows project K and V and the chosen ones continue;
    at the last layer one row continues. Chosen rows count as spread evenly, the suffix is at the end.
    """
    q_size, mlp = spec.hidden_size * spec.q_size, spec.mlp_params
    kv_size = 2 * spec.hidden_size * spec.kv_size
    found = []
    for index, report in enumerate(layers):
        last = index == len(layers) - 1
        rows = report.rows
        if last:
            rows = 1
        elif report.status is LayerStatus.CHECK:
            rows = layers[index + 1].rows
        kv_rows = report.rows - (report.fresh if index == 0 else 0)
        seen = suffix * num_tokens + max(0, rows - suffix) * num_tokens / 2 if rows > 1 else num_tokens
        found.append(
            (
                2.0 * (rows * (2 * q_size + mlp) + kv_rows * kv_size),
                4.0 * spec.num_heads * spec.head_dim * seen,
                2.0 * (2 * q_size + mlp + kv_size),
            )
        )
    return found
