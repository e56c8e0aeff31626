"""Cost model: expected times of a prefill and the least time of a decode step, given the device's measured ceilings.

An expected time is that of a queue: threads read stored KV, the host sends it and launches layer after layer, and the
GPU computes a layer once it is launched and its KV has arrived. `Assumed` says where each number is from; `Design` is
what the code does. With the design of the committed rows, the model gives their times (`expected.py` writes both down).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_cli.blend.policy import tiled_count
from cacheblend_cli.blend.selectors import budget
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
    """Numbers of Hopper GPUs and of their hosts, and their sources: `rows` are committed ones, `profile` the busy time
    of such a row; `fit` is a number chosen so that rows come out, `here` one measured without a GPU. Times in
    seconds."""

    # GPU
    num_sms: int = 132
    tile: tuple[int, int] = (128, 256)  # of a matrix product: a wave of tiles is done when its last tile is
    tile_share: float = 0.93  # of a multiprocessor's part of the matrix ceiling, in a tile; profile: full prefills
    attention_s: float = 20e-6  # of attention whatever its size, and
    attention_share: float = 0.67  # of the matrix ceiling; rows: six sizes of prefill_attention, within 12 %
    l2_bytes: float = 40e6  # of what was just read or written, that the L2 cache still holds
    l2: float = 5e12  # bytes/s from it
    kernel_s: float = 3e-6  # least time of a kernel and the gap after it
    fp32_share: float = 0.1  # of the matrix ceiling, of the correction's products (three TF32 products each)
    # recomputed rows of the fullest chunk over the mean, query and hkvd; here, random weights: 124 and 140 of 88 with 8
    # chunks, 107 and 134 of 78 with 32
    fullest: tuple[float, float] = (1.4, 1.7)
    # host; the first four are times here, `SLOWER` scales them
    driver_s: float = 4e-6  # of a launch below Triton's launcher
    torch_s: float = 9e-6  # of one of torch's operations
    replay_s: float = 8e-6  # of a graph; fit: prefills
    layer_s: float = 15e-6  # of Python in a layer of graphs; fit: prefills
    start_s: float = 1e-3  # rows, their uploads, the policy
    setup_s: float = 2e-3  # with stored KV: plan, tables, buffers; fit: "store to pool"
    lookup_s: float = 25e-6  # of a chunk's layer in the store; here 7 us, and 85 us for a manifest, times 2.7
    send_s: float = 0.27e-3  # of a batch: two streams, events, a copy and load_kv; fit: "store to pool"
    send_copy_s: float = 25e-6  # of a copy from a cached block: one of torch's operations
    send_launch_s: float = 80e-6  # of load_layers: the slowest launch in README.md
    thread_bytes: float = 3.2e9  # read, checked and copied per second by a thread: 79 ms with one thread (README.md)
    num_threads: int = 4
    contention: float = 1.6  # of launches while threads read and hand the GIL over; fit: "hkvd"
    choose_s: float = 2e-3  # some 60 small operations


SLOWER = {"NVIDIA H100 80GB HBM3": 3.7, "NVIDIA H200": 2.7}
"""A launch's host time on the machines of the committed rows over that of `gpu_host.json`: the rows of a 1B's full
prefill, which is bound by launches (25 and 18 ms; 45 to 80 us a launch on the first, 17 to 25 us here)."""


@dataclass(frozen=True)
class Design:
    """What the code does."""

    lookups: bool = False  # of every chunk and layer at every question
    cached: bool = True  # chunks lie in pinned memory, a block each
    groups: int = 4  # of layers, copied together
    replays: int = 1  # of a layer of few rows
    graphed: bool = True  # probe and correction are part of the graph
    copies: int = 0  # of activations into graphs' buffers, a layer
    # a step of the elimination that inverts a chunk's covariance: half of what it took, by instructions and barriers
    pivot_s: float = 84e-6 / 96
    nearest: bool = True  # rows are rounded to the nearest tile, else up
    choose_share: float = 1 / 3  # of `Assumed.choose_s`
    setup_share: float = 0.5  # of `Assumed.setup_s`; here .31 ms for a prefix and eight cached chunks, times 2.7 to 3.7
    probed: float = 5 / 6  # layers behind the first third of them whose attention is recorded end here
    slice_rows: int = 2048  # of a full prefill


MEASURED = Design(True, False, 0, 2, False, 6, 168e-6 / 96, False, 1.0, 1.0)
"""The code of the committed rows; `inverse_kernel` took 168 us there, for 96 steps."""
NEW = Design()
MOST_ROWS = 1024  # of a layer as a graph


@dataclass(frozen=True)
class Host:
    """Host seconds of a layer's launches."""

    layer: float
    probe: float  # more, in a probed layer
    correction: float  # more, in a corrected layer
    slower: float = 1.0

    @classmethod
    def of(cls, microseconds: dict[str, float], assumed: Assumed, slower: float = 1.0) -> Host:
        def triton(name: str, launches: int) -> float:
            return slower * (microseconds[name] * 1e-6 + launches * assumed.driver_s)

        layer = triton("prefill_attention", 2) + triton("rope_and_cache", 1) + 2 * triton("add_rms_norm", 1)
        layer += triton("act_and_mul", 1) + slower * 4 * assumed.torch_s
        correction = triton("correct_stale", 7) + slower * 3 * assumed.torch_s
        return cls(layer, triton("attention_peaks", 2), correction, slower)


@dataclass(frozen=True)
class Part:
    """Stored KV that is sent at once."""

    layer: int  # the first one that needs it
    read: float  # time at which it is in pinned memory
    send_s: float
    num_bytes: float


class Queue:
    """Times of the host and of the GPU while layers are launched. host: time at which launching begins."""

    def __init__(self, assumed: Assumed, bus: float, host: float, parts: list[Part]) -> None:
        self._assumed, self._bus, self._parts = assumed, bus, parts
        self.host, self.gpu = host, 0.0
        self._arrived = [(0, 0.0)]  # first layer of each part that was sent, and the time of its arrival
        self._read = max((part.read for part in parts), default=0.0)

    def work(self, seconds: float) -> None:
        """Let the host launch, which takes longer while threads read."""
        most = max(0.0, self._read - self.host)
        slow = min(seconds * self._assumed.contention, most)
        self.host += slow + seconds - slow / self._assumed.contention

    def wait(self, layer: int) -> float:
        """Send what the layer needs and what else was read. Returns the time at which the layer's KV has arrived."""
        while self._parts and (self._parts[0].layer <= layer or self._parts[0].read <= self.host):
            part = self._parts.pop(0)
            self.host = max(self.host, part.read) + part.send_s
            self._arrived.append((part.layer, max(self._arrived[-1][1], self.host) + part.num_bytes / self._bus))
        return max(time for first, time in self._arrived if first <= layer)

    def layer(self, layer: int, gpu_s: float, host_s: float, *, loads: bool = True) -> None:
        arrived = self.wait(layer) if loads else 0.0
        begun = self.host + self._assumed.driver_s
        self.work(host_s)
        self.gpu = max(max(self.gpu, begun, arrived) + gpu_s, self.host)


class Gpu:
    """Times of a GPU's work. Lengths in tokens, times in seconds."""

    def __init__(self, spec: ModelSpec, ceilings: Ceilings, assumed: Assumed) -> None:
        self.spec, self.ceilings, self.assumed = spec, ceilings, assumed

    def product(self, rows: int, inputs: int, outputs: int) -> float:
        """Return the time of rows [rows, inputs] times weights [inputs, outputs] in 16 bits: waves of tiles, or reading
        the weights."""
        a, (height, width), memory = self.assumed, self.assumed.tile, self.ceilings.memory
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

    def attention(self, rows: int, keys: float) -> float:
        """Return the time of attention, or of finding its peaks, of rows that see `keys` keys on average."""
        a = self.assumed
        return a.attention_s + 4.0 * self.spec.q_size * rows * keys / (a.attention_share * self.ceilings.flops)

    def layer(self, rows: int, keys: float) -> float:
        spec = self.spec
        products = (
            (spec.hidden_size, spec.q_size + 2 * spec.kv_size),
            (spec.q_size, spec.hidden_size),
            (spec.hidden_size, 2 * spec.intermediate_size),
            (spec.intermediate_size, spec.hidden_size),
        )
        moved = 2.0 * rows * (8 * spec.hidden_size + 2 * spec.q_size + 4 * spec.kv_size + 3 * spec.intermediate_size)
        return (
            sum(self.product(rows, *shape) for shape in products)
            + self.attention(rows, keys)
            + max(moved / self.ceilings.memory, 4 * self.assumed.kernel_s)
        )

    def last(self, rows: int, num_tokens: int) -> float:
        """Return the time of the last layer, which computes K and V of all rows and one row more, and of the head."""
        spec = self.spec
        head = 2.0 * spec.vocab_size * spec.hidden_size / self.ceilings.memory
        return self.product(rows, spec.hidden_size, 2 * spec.kv_size) + self.layer(1, num_tokens) + head

    def correction(self, num_tokens: int, known: int, chunk: int, fullest: float, pivot_s: float) -> float:
        """Return the time of correcting a layer with `known` rows. fullest: those of the chunk with most of them over
        the mean."""
        a, width = self.assumed, 2 * self.spec.kv_size
        each = max(1, round(known * chunk / num_tokens))  # known rows of a chunk
        held = 2.0 * num_tokens * width  # K and V of the chunks: read three times, and written; points written and read
        cached = a.l2 if 2 * held < a.l2_bytes else self.ceilings.memory
        memory = held / self.ceilings.memory + 5 * held / cached
        memory += 4.0 * known * (4 * width + 3 * chunk) / cached
        flops = 2.0 * known * chunk * width / (a.attention_share * self.ceilings.flops)
        flops += 2.0 * known * (chunk + each) * width / (a.fp32_share * self.ceilings.flops)
        return memory + flops + math.ceil(fullest * each / 32) * 32 * pivot_s + 8 * a.kernel_s


class Expected:
    """Expected times of a model's prefills on a GPU, over chunks of 512 tokens. Lengths in tokens, times in seconds."""

    CHUNK = 512

    def __init__(
        self, spec: ModelSpec, ceilings: Ceilings, host: Host, design: Design, assumed: Assumed | None = None
    ) -> None:
        self.spec, self.host, self.design, self.assumed = spec, host, design, assumed or Assumed()
        self.ceilings, self.gpu = ceilings, Gpu(spec, ceilings, self.assumed)

    def full(self, num_tokens: int) -> float:
        """Return the time to the first token of a full prefill."""
        queue, rows = Queue(self.assumed, self.ceilings.bus, self.assumed.start_s, []), self.design.slice_rows
        for start in range(0, num_tokens, rows):
            for layer in range(self.spec.num_layers - 1):
                queue.layer(layer, self.gpu.layer(rows, start + rows / 2), self.host.layer)
            queue.layer(layer + 1, self.gpu.last(rows, start + rows), self.host.layer)
        return queue.gpu

    def load(self, num_tokens: int, kv_bytes: float) -> float:
        """Return the time from the store to the pool alone."""
        queue = self._queue(num_tokens, kv_bytes)
        return max(queue.wait(self.spec.num_layers), queue.host) + self.assumed.start_s

    def rows(self, num_tokens: int, suffix: int, ratio: float) -> int:
        """Return the rows of a layer: recomputed and fresh ones, in whole tiles."""
        tile, total = self.assumed.tile[0], num_tokens - suffix
        count = budget(ratio, total)
        return suffix + (
            tiled_count(count, total, suffix, tile) if self.design.nearest else count + -(count + suffix) % tile
        )

    def blended(
        self, selector: str, num_tokens: int, suffix: int, ratio: float, *, corrected: bool, kv_bytes: float = 0.0
    ) -> float:
        """Return the time to the first token of a blended prefill. kv_bytes: to load, 0 if the KV is in the pool."""
        spec, gpu, design, a = self.spec, self.gpu, self.design, self.assumed
        rows, last = self.rows(num_tokens, suffix, ratio), spec.num_layers - 1
        few = gpu.layer(rows, (suffix * num_tokens + (rows - suffix) * num_tokens / 2) / rows)
        fullest = a.fullest[selector == "hkvd"]
        more = gpu.correction(num_tokens, rows - suffix, self.CHUNK, fullest, design.pivot_s) if corrected else 0.0
        choose_s, chosen_s = design.choose_share * a.choose_s, 60 * design.choose_share * a.kernel_s
        queue = self._queue(num_tokens, kv_bytes)
        queue.work(a.start_s)
        if selector == "query":
            first, stop = self.probed
            for layer in range(stop + 1):
                probed = (layer >= first) * gpu.attention(suffix, num_tokens)
                host_s = self._host(suffix, layer, self.host.probe * (layer >= first))
                queue.layer(layer, gpu.layer(suffix, num_tokens) + self._copies(suffix) + probed, host_s)
            queue.layer(stop, chosen_s, choose_s)
            queue.layer(0, few, self.host.layer)
            begun = 1
        else:  # layer 0 of all rows, whose K and V are exact; then fresh K and V of all rows at the check layer
            check = gpu.product(num_tokens, spec.hidden_size, 2 * spec.kv_size)
            queue.layer(0, gpu.layer(num_tokens, num_tokens / 2), self.host.layer)
            queue.layer(1, few + check + chosen_s, self.host.layer + choose_s)
            begun = 2
        correction_s = self.host.correction if corrected else 0.0
        for layer in range(begun, last):
            queue.layer(layer, few + self._copies(rows) + more, self._host(rows, layer, correction_s))
        queue.layer(last, gpu.last(rows, num_tokens) + more, self.host.layer + correction_s)
        return queue.gpu

    @property
    def probed(self) -> tuple[int, int]:
        """The first and last layer whose attention the question's probe records."""
        return round(self.spec.num_layers / 3), max(0, round(self.spec.num_layers * self.design.probed) - 1)

    def _host(self, rows: int, layer: int, more: float) -> float:
        """Return the host's time of a layer. more: of a probe or a correction."""
        if rows > MOST_ROWS or layer == 0:
            return self.host.layer + more
        graph = self.host.slower * (self.assumed.layer_s + self.design.replays * self.assumed.replay_s)
        return graph + (0.0 if self.design.graphed else more)

    def _copies(self, rows: int) -> float:
        return self.design.copies * self.assumed.kernel_s * (rows <= MOST_ROWS)

    def _queue(self, num_tokens: int, kv_bytes: float) -> Queue:
        """Return the queue of a prompt whose stored KV is found."""
        a, design, num_layers = self.assumed, self.design, self.spec.num_layers
        if not kv_bytes:
            return Queue(a, self.ceilings.bus, 0.0, [])
        chunks = math.ceil(num_tokens / self.CHUNK) + 1  # and the prefix
        begun = design.setup_share * a.setup_s + design.lookups * a.lookup_s * chunks * num_layers
        if design.cached:
            send_s = chunks * a.send_copy_s + 2 * a.send_launch_s  # two, since the prefix is stored exactly
            sizes = [num_layers * group // design.groups for group in range(design.groups)]
            parts = [Part(layer, begun, send_s, kv_bytes / design.groups) for layer in sizes]
        else:
            batches = num_layers * (1 + math.ceil(kv_bytes / num_layers / BATCH_BYTES))
            each = kv_bytes / batches / a.thread_bytes / a.num_threads
            parts = [
                Part(num_layers * n // batches, begun + (n + 1) * each, a.send_s, kv_bytes / batches)
                for n in range(batches)
            ]
        return Queue(a, self.ceilings.bus, begun, parts)


BATCH_BYTES = 8 << 20  # of a batch from the store; the prefix is one of its own


def host_times(slower: float) -> Host:
    measured = json.loads((RESULTS / "gpu_host.json").read_text(encoding="utf-8"))
    return Host.of(measured["microseconds"], Assumed(), slower)


def expected_s(
    spec: ModelSpec, ceilings: Ceilings, length: int, suffix: int, case: str, kv_bytes: float,
    design: Design = NEW, slower: float = 2.7,
) -> float:  # fmt: skip
    """Return the expected seconds of a case of `end_to_end.py`, such as "query 0.15 uncorrected". kv_bytes: stored
    bytes of its chunks. slower: see `SLOWER`."""
    expected = Expected(spec, ceilings, host_times(slower), design)
    match case.removesuffix(" in the pool").split():
        case ["full"]:
            return expected.full(length)
        case ["store", *_]:
            return expected.load(length, kv_bytes)
        case [selector, ratio, *more]:
            loaded = 0.0 if case.endswith("in the pool") else kv_bytes
            corrected = more != ["uncorrected"]
            return expected.blended(selector, length, suffix, float(ratio), corrected=corrected, kv_bytes=loaded)
    raise AssertionError(case)
