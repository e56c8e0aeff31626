"""Cost model: expected times of a prefill and the least time of a decode step, given the device's measured ceilings.

    python benchmarks/gpu/cost.py     # writes benchmarks/results/gpu_expected.md, from gpu_host.json

An expected time is that of a queue: the host launches layer after layer, the GPU computes a layer once it is launched
and its KV has arrived. The GPU's part is assumed, not measured: see `Assumed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_store.format.blobs import blob_spec

from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Ceilings:
    """flops: bf16 matrix product, 1/s; memory: device memory, bytes/s; bus: host to device, bytes/s."""

    flops: float
    memory: float
    bus: float

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Ceilings:
        return cls(
            measured["matmul_tflop_s"] * 1e12, measured["device_copy_gb_s"] * 1e9, measured["host_to_device_gb_s"] * 1e9
        )


def decode_floor(spec: ModelSpec, batch: int, kv_len: float, itemsize: int, ceilings: Ceilings) -> float:
    """Return seconds of a step: every weight of the layers and the head, and the KV of each sequence, are read once."""
    layer = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size) + spec.mlp_params
    weights = itemsize * (spec.num_layers * layer + spec.vocab_size * spec.hidden_size)
    return (weights + batch * kv_len * spec.kv_bytes_per_token(itemsize)) / ceilings.memory


@dataclass(frozen=True)
class Assumed:
    """What a Hopper GPU is assumed to do beside its ceilings. Times in seconds."""

    num_sms: int = 132
    tile: tuple[int, int] = (128, 256)  # of a matrix product: a wave of tiles is done when its last tile is
    tile_share: float = 0.9  # of a multiprocessor's part of the matrix ceiling, in a tile
    attention_share: float = 0.5  # of the matrix ceiling
    copy_share: float = 0.8  # of the copy ceiling, of norms, activations and the like
    l2_bytes: float = 40e6  # of what was just read or written, that the L2 cache still holds
    l2: float = 5e12  # bytes/s from it
    kernel_s: float = 3e-6  # least time of a kernel and the gap after it
    pivot_s: float = 0.25e-6  # a step of the elimination that inverts a chunk's covariance
    fp32_share: float = 0.1  # of the matrix ceiling, of the correction's products (three TF32 products each)
    driver_s: float = 4e-6  # host time of a launch below Triton's launcher
    torch_s: float = 9e-6  # host time of one of torch's operations
    start_s: float = 0.5e-3  # host time before the first layer: plan, rows, loader (0.4 ms here, without a GPU)
    choose_s: float = 0.3e-3  # host time of choosing tokens after a probe, and of their rows (0.4 ms here, on the CPU)
    choose_operations: int = 17


@dataclass(frozen=True)
class Host:
    """Host seconds of a layer's launches."""

    layer: float
    probe: float  # more, in a probed layer
    correction: float  # more, in a corrected layer

    @classmethod
    def of(cls, microseconds: dict[str, float], assumed: Assumed) -> Host:
        def triton(name: str, launches: int) -> float:
            return microseconds[name] * 1e-6 + launches * assumed.driver_s

        layer = triton("prefill_attention", 2) + triton("rope_and_cache", 1) + 2 * triton("add_rms_norm", 1)
        layer += triton("act_and_mul", 1) + 4 * assumed.torch_s
        return cls(layer, triton("attention_peaks", 2), triton("correct_stale", 7) + 3 * assumed.torch_s)


class Expected:
    """Expected times of a model's prefills on a GPU. Lengths in tokens, times in seconds."""

    def __init__(self, spec: ModelSpec, ceilings: Ceilings, host: Host, assumed: Assumed | None = None) -> None:
        self.spec, self.ceilings, self.host, self.assumed = spec, ceilings, host, assumed or Assumed()

    def product(self, rows: int, inputs: int, outputs: int) -> float:
        """Return the time of rows [rows, inputs] times weights [inputs, outputs] in 16 bits: waves of tiles, or reading
        the weights."""
        a, (height, width), memory = self.assumed, self.assumed.tile, self.assumed.copy_share * self.ceilings.memory
        tiles = math.ceil(rows / height) * math.ceil(outputs / width)
        each = (
            2.0 * height * width * inputs / (a.tile_share * self.ceilings.flops / a.num_sms) * min(1.0, rows / height)
        )
        waves = (  # the sum may be split, and its parts written and read
            math.ceil(tiles * splits / a.num_sms) * each / splits
            + (splits > 1) * 8.0 * splits * rows * outputs / memory
            for splits in (1, 2, 4, 8)
        )
        return max(min(waves), 2.0 * inputs * outputs / memory, a.kernel_s)

    def layer(self, rows: int, keys: float) -> float:
        """Return the time of a layer of that many rows, each of which sees `keys` keys on average."""
        spec, a = self.spec, self.assumed
        products = (
            (spec.hidden_size, spec.q_size + 2 * spec.kv_size),
            (spec.q_size, spec.hidden_size),
            (spec.hidden_size, 2 * spec.intermediate_size),
            (spec.intermediate_size, spec.hidden_size),
        )
        moved = 2.0 * rows * (8 * spec.hidden_size + 2 * spec.q_size + 4 * spec.kv_size + 3 * spec.intermediate_size)
        attention = 4.0 * spec.q_size * rows * keys / (a.attention_share * self.ceilings.flops)
        return (
            sum(self.product(rows, *shape) for shape in products)
            + max(attention, 2 * a.kernel_s)
            + max(moved / (a.copy_share * self.ceilings.memory), 4 * a.kernel_s)
        )

    def probe(self, rows: int, keys: int) -> float:
        """Return the time that recording attention takes in a layer."""
        flops = 2 * 2.0 * self.spec.q_size * rows * keys / (self.assumed.attention_share * self.ceilings.flops)
        return max(flops, 2 * self.assumed.kernel_s)

    def correction(self, num_tokens: int, known: int, chunk: int) -> float:
        """Return the time of correcting a layer, whose `known` rows are spread evenly over chunks of that size."""
        a, width = self.assumed, 2 * self.spec.kv_size
        each = max(1, round(known * chunk / num_tokens))  # known rows of a chunk
        held = 2.0 * num_tokens * width  # K and V of the chunks: read three times, and written; points written and read
        cached = a.l2 if 2 * held < a.l2_bytes else a.copy_share * self.ceilings.memory
        memory = held / (a.copy_share * self.ceilings.memory) + 5 * held / cached
        memory += 4.0 * known * (4 * width + 3 * chunk) / cached
        flops = 2.0 * known * chunk * width / (a.attention_share * self.ceilings.flops)
        flops += 2.0 * known * (chunk + each) * width / (a.fp32_share * self.ceilings.flops)
        inverse = math.ceil(each / 32) * 32 * a.pivot_s
        return memory + flops + inverse + 7 * a.kernel_s

    def full(self, num_tokens: int) -> float:
        """Return the time to the first token of a full prefill. The last layer computes K and V of all rows, and one
        row more."""
        steps = [(self.layer(num_tokens, num_tokens / 2), self.host.layer, 0.0)] * (self.spec.num_layers - 1)
        last = self.product(num_tokens, self.spec.hidden_size, 2 * self.spec.kv_size) + self.layer(1, num_tokens)
        return self._queue([*steps, (last, self.host.layer, 0.0)])

    def blended(
        self, selector: str, num_tokens: int, suffix: int, ratio: float, *, corrected: bool, kv_bytes: float = 0.0,
        chunk: int = 512,
    ) -> float:  # fmt: skip
        """Return the time to the first token of a blended prefill. kv_bytes: to load, 0 if the KV is in the pool."""
        spec, host = self.spec, self.host
        rows = math.ceil((ratio * (num_tokens - suffix) + suffix) / 128) * 128
        arrival = kv_bytes / self.ceilings.bus / spec.num_layers  # of each layer after the one before it
        keys = (suffix * num_tokens + (rows - suffix) * num_tokens / 2) / rows
        few = self.layer(rows, keys), host.layer
        moved = (self.correction(num_tokens, rows - suffix, chunk), host.correction) if corrected else (0.0, 0.0)
        after = (few[0] + moved[0], few[1] + moved[1])
        steps: list[tuple[float, float, float]] = []
        if selector == "query":
            first, stop = round(spec.num_layers / 3), max(0, round(spec.num_layers * 5 / 6) - 1)
            for layer in range(stop + 1):
                probed = layer >= first
                gpu_s = self.layer(suffix, num_tokens) + probed * self.probe(suffix, num_tokens)
                steps.append((gpu_s, host.layer + probed * host.probe, arrival))
            steps.append((self.assumed.choose_operations * self.assumed.kernel_s, self.assumed.choose_s, 0.0))
            steps.append((*few, 0.0))
            steps += [(*after, arrival if layer > stop else 0.0) for layer in range(1, spec.num_layers - 1)]
        else:  # layer 0 of all rows, whose K and V are exact; then fresh K and V of all rows at the check layer
            check = self.product(num_tokens, spec.hidden_size, 2 * spec.kv_size)
            steps += [(self.layer(num_tokens, num_tokens / 2), host.layer, arrival), (few[0] + check, few[1], arrival)]
            steps += [(*after, arrival)] * (spec.num_layers - 3)
        last = self.product(rows, spec.hidden_size, 2 * spec.kv_size) + self.layer(1, num_tokens)
        return self._queue([*steps, (last + moved[0], host.layer + moved[1], arrival)])

    def _queue(self, steps: Sequence[tuple[float, float, float]]) -> float:
        """Return the end of the last step. steps: GPU time, host time, and time until the KV arrives after that of the
        step before."""
        host, gpu, arrived = self.assumed.start_s, 0.0, 0.0
        for gpu_s, host_s, arrival in steps:
            arrived += arrival
            begun, host = host, host + host_s
            gpu = max(max(gpu, begun + self.assumed.driver_s, arrived) + gpu_s, host)
        head = 2.0 * self.spec.vocab_size * self.spec.hidden_size / (self.assumed.copy_share * self.ceilings.memory)
        return gpu + head


def measured_host() -> tuple[Host, dict[str, Any]]:
    measured = json.loads((RESULTS / "gpu_host.json").read_text(encoding="utf-8"))
    return Host.of(measured["microseconds"], Assumed()), measured


def expected_s(spec: ModelSpec, ceilings: Ceilings, length: int, suffix: int, case: str, kv_bytes: float) -> float:
    """Return the expected seconds of a case of `end_to_end.py`, such as "query 0.15 uncorrected"."""
    expected = Expected(spec, ceilings, measured_host()[0])
    if case == "full":
        return expected.full(length)
    selector, ratio, *more = case.split()
    corrected = more != ["uncorrected"]
    return expected.blended(selector, length, suffix, float(ratio), corrected=corrected, kv_bytes=kv_bytes)


GPUS = {"H100": Ceilings(798e12, 3.0e12, 55e9), "H200": Ceilings(790e12, 4.3e12, 55e9)}
"""Ceilings as measured on such cards: bf16 product, copy, host to device."""
LOADED = 27e9
"""Bytes/s at which stored KV reaches the GPU, if the loader's copies and digests are the limit."""


def table(name: str, num_tokens: int, host: Host) -> list[str]:
    """Return rows of Markdown: the expected times of a configuration's prefills."""
    config = json.loads((ROOT / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    spec, suffix, ratio, lines = spec_from_config(config), 64, 0.15, list[str]()
    blob = blob_spec("int7", 512, spec.num_kv_heads, spec.head_dim)
    kv_bytes = sum(part.num_bytes for part in blob.values()) * (num_tokens - suffix) / 512 * spec.num_layers
    for gpu, ceilings in GPUS.items():
        expected = Expected(spec, ceilings, host)
        slow = Expected(spec, Ceilings(ceilings.flops, ceilings.memory, LOADED), host)
        full = expected.full(num_tokens)
        lines.append(f"| {gpu} | {num_tokens} | full prefill | {full * 1e3:.1f} | | |")
        for selector in ("query", "hkvd"):
            for corrected in (True, False):
                found = [
                    of.blended(selector, num_tokens, suffix, ratio, corrected=corrected, kv_bytes=size)
                    for of, size in ((expected, 0.0), (expected, kv_bytes), (slow, kv_bytes))
                ]
                what = f"`{selector}` .15{'' if corrected else ' uncorrected'}"
                cells = " | ".join(f"{seconds * 1e3:.1f} ({full / seconds:.1f} x)" for seconds in found)
                lines.append(f"| {gpu} | {num_tokens} | {what} | {cells} |")
    return lines


def main() -> None:
    host, measured = measured_host()
    lines = [
        "# Expected on a GPU",
        "",
        "Written by `benchmarks/gpu/cost.py`: computed, not measured on a GPU. Host time of each launch is measured"
        f" (`gpu_host.json`: {measured['hardware']['cpu']}, triton {measured['triton']}): "
        f"{host.layer * 1e6:.0f} us a layer, {host.probe * 1e6:.0f} more in a probed and {host.correction * 1e6:.0f} more"
        " in a corrected one. What the GPU does is assumed from its ceilings (`cost.py: Assumed`).",
    ]
    for name in ("llama-3.1-8b", "llama-3.2-1b"):
        lines += ["", f"## {name}, chunks of 512 tokens, int7, a question of 64 tokens", ""]
        lines += ["| GPU | tokens | first token, ms | KV in the pool | loaded at 55 GB/s | loaded at 27 GB/s |"]
        lines += ["|" + "---|" * 6]
        for num_tokens in (4096, 16384):
            lines += table(name, num_tokens, host)
    (RESULTS / "gpu_expected.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
