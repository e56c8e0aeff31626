"""Quantised models that `cacheblend init` offers, and which of them run well here. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_cli.model.machine import Machine
from cacheblend_cli.model.measured_ratios import MEASURED_RATIOS, MeasuredRatio
from cacheblend_cli.model.named import SMOLLM2, SMOLLM2_BYTES

GPU_SHARE, CPU_SHARE = 0.5, 0.4
"""Share of GPU or host memory for weights. The rest is for KV, activations and other programs."""
READING = 8.0  # tokens/s that stay ahead of a reader
STEP_S = 0.006  # of a decode step beside its products of weights (benchmarks/results/decode.md)


@dataclass(frozen=True)
class CatalogueModel:
    """A published model that this version reads."""

    name: str
    model: str  # value of --model
    num_bytes: int  # size of its file
    parameters: float
    license: str
    digest: str = ""  # key in MEASURED_RATIOS, if it was measured
    note: str = ""

    @property
    def measured_ratio(self) -> MeasuredRatio | None:
        return MEASURED_RATIOS.get(self.digest)


def _qwen(name: str, repository: str, file: str, num_bytes: int, parameters: float, **more: str) -> CatalogueModel:
    return CatalogueModel(name, f"Qwen/{repository}:{file}", num_bytes, parameters, "Apache-2.0", **more)


CATALOGUE = (
    CatalogueModel(
        SMOLLM2, SMOLLM2, SMOLLM2_BYTES, 0.135e9, "Apache-2.0", "1dff70ef9e211d0ab8951aa641e75aa1", "to try"
    ),
    _qwen(
        "Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q4_k_m.gguf", 491_400_032, 0.49e9
    ),
    _qwen(
        "Qwen2.5-Coder-1.5B", "Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 1_117_320_768, 1.54e9,
        digest="df64934f4e28ad785ba26d8f3d6df2f0", note="for code",
    ),
    _qwen("Qwen2.5-1.5B", "Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q4_k_m.gguf", 1_117_320_736, 1.54e9),
    _qwen("Qwen3-4B", "Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", 2_497_280_256, 4.02e9),
    _qwen("Qwen3-8B", "Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", 5_027_783_488, 8.19e9),
)  # fmt: skip
"""By quality of answers, the best last."""


def tokens_per_s(model: CatalogueModel, machine: Machine) -> float | None:
    """Return the expected speed of decoding: each token multiplies all weights once. None if it was not measured."""
    return 1 / (model.num_bytes / machine.bytes_per_s + STEP_S) if machine.bytes_per_s else None


def fits(model: CatalogueModel, machine: Machine) -> bool:
    """Return whether the weights leave room in memory. On a GPU they are held in 16 bits."""
    if machine.gpu_bytes:
        return 2 * model.parameters <= machine.gpu_bytes * GPU_SHARE
    return model.num_bytes <= machine.memory_bytes * CPU_SHARE


def recommend(machine: Machine) -> CatalogueModel:
    """Return the best model that fits and, on a CPU, decodes at least at the speed READING; else the smallest."""
    good = [
        m for m in CATALOGUE if fits(m, machine) and (machine.gpu_bytes or (tokens_per_s(m, machine) or 0) >= READING)
    ]
    return good[-1] if good else CATALOGUE[0]
