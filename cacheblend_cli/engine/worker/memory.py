"""A GPU's memory across questions: a KV pool in the memory left by weights and activations, and its decode graphs. On a
CPU each prompt has its own pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch

from cacheblend_cli.blend.policy import BlendPolicy, policy_of
from cacheblend_cli.blend.prefill import blended_prefill
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import make_selector
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.worker.decode import LEAST_KV_BUCKET, DecodeRunner, GraphRunner, bucket, make_runner
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.device_time import DeviceTime, mark
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool, bytes_per_token
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.device import gib
from cacheblend_cli.model.mlp import GPU_MLP_ROWS
from cacheblend_cli.prompt.collection import EXACT, codec_of
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt
from cacheblend_cli.types import BlendParams

if TYPE_CHECKING:
    from cacheblend_cli.kv.host_cache import HostCache

WARM_UP = (16, 19, 5)  # tokens of two chunks, the second of them not aligned, and of the suffix
WARM_UP_KV_LENS = (1024, 2048, 4096, 8192)  # contexts whose decode graph of one answer is captured
STATES = 32  # of a hybrid's recurrent layers: those that the pool keeps, and as many sequences
PROFILE_ROWS = (GPU_MLP_ROWS, 256)  # from GPU_MLP_ROWS on, a prefill's peak grows evenly with its rows


class Meter:
    """Measures a GPU's memory in bytes: peaks in PyTorch's allocator, total use by the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = int(torch.cuda.mem_get_info(device)[1])

    def used(self) -> int:
        """Return the bytes in use by weights, other processes and the CUDA runtime."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def peak(self, run: Callable[[], None]) -> int:
        """Return the peak of `run` above the bytes in use before it."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device) - before)


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes. A prefill of n rows takes fixed + n * per_row beside weights and pool."""

    total: int
    used: int
    fixed: int
    per_row: int
    times: tuple[tuple[int, float], ...] = ()  # rows and seconds of full prefills


@dataclass(frozen=True)
class DeviceMemory:
    pool: KVPool
    runner: DecodeRunner
    profile: MemoryProfile | None = None  # of a GPU
    host_cache: HostCache | None = None  # of chunks that go to a GPU

    @property
    def num_tokens(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        return self.pool.allocator.num_free * self.pool.block_size


def reserve(
    decoder: Decoder, config: EngineConfig, *, meter: Meter | None = None, num_prompts: int = 1
) -> DeviceMemory:
    """Profile a prefill, allocate the pool and warm up. meter: a GPU's by default. Raises DeviceError if not even one
    block fits."""
    block_size = config.block_size
    profile = measure(decoder, block_size, meter or Meter(decoder.device))
    per_token, context = bytes_per_token(decoder), decoder.spec.max_context
    num_blocks = blocks_that_fit(profile, config.gpu_memory_utilization, per_token, context, block_size, num_prompts)
    # block tables are the same on every rank
    num_blocks = -int(decoder.part.ranks.largest(torch.tensor([-num_blocks], device=decoder.device)))
    try:
        pool = KVPool.of(decoder, num_blocks, block_size)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"a KV pool of {num_blocks} blocks does not fit on {decoder.device} anymore",
            "stop other programs on the GPU, or lower --gpu-memory-utilization",
        ) from error
    cache = None
    if decoder.device.type == "cuda":
        from cacheblend_cli.kv.cuda_loader import warm_up_loading

        cache = warm_up_loading(decoder.device, config.host_cache, decoder.part.ranks.size)
    if pool.allocator.num_free * block_size >= sum(WARM_UP):
        warm_up(decoder, pool, config.kv_dtype)
    num_rows = 1 + config.speculate if isinstance(config.speculate, int) else 1
    runner = make_runner(decoder, pool, config.eager, num_rows)
    if isinstance(runner, GraphRunner):
        warm_up_graphs(runner, min(context, pool.allocator.num_free * block_size), num_rows)
    if cache is not None:
        cache.wait()
    return DeviceMemory(pool, runner, profile, cache)


@torch.inference_mode()
def warm_up(decoder: Decoder, pool: KVPool, codec: str = "auto") -> None:
    """Launch every kernel that a question may launch, so that the first question compiles nothing: attention of all
    sizes, and small blends, with and without a check layer. codec: of the chunks' KV, auto for the default; the prefix
    is stored exactly."""
    from cacheblend_cli.kv.staging import ZeroLoader

    *chunks, suffix = WARM_UP
    codec, exact = (codec_of(name, decoder.dtype, decoder.spec) for name in (codec, EXACT))
    inputs = [ChunkInput(b"", "", (0,) * n, same_regime=False) for n in chunks]
    plan = plan_prompt([], inputs, [0] * suffix, prefix_key=None, reuse=decoder.state_layout is None)
    sequence = pool.new_sequence(plan.num_tokens)
    try:
        checked = BlendParams(ratio=0.5, selector="hkvd" if decoder.spec.num_kv_layers > 1 else "none")
        for blend, stored in ((BlendParams(), codec), (checked, exact)):
            prompt = Prompt(decoder, plan, sequence, ZeroLoader(decoder, sequence, plan, stored))
            blended_prefill(prompt, policy_of(blend, decoder.spec.num_kv_layers, layer0_exact=True))
    finally:
        sequence.release()
    warm_up_attention(decoder, pool)


def warm_up_graphs(runner: GraphRunner, most_tokens: int, num_rows: int = 1) -> None:
    """Capture the graphs of one answer after a prompt of usual length, of one row and of num_rows. most_tokens: of a
    prompt and its answer."""
    for kv_len in sorted({bucket(min(n, most_tokens), LEAST_KV_BUCKET) for n in WARM_UP_KV_LENS}):
        for count in {1, num_rows}:
            runner.graph(count, kv_len)


def warm_up_attention(decoder: Decoder, pool: KVPool) -> None:
    """Warm up attention of each kind of layer, for any number of rows and any context length."""
    spec, capacity = decoder.own_spec, len(pool.layers[0].k) * pool.block_size
    kinds = {}
    for layer, cache in zip(decoder.layers, pool.layers, strict=True):
        params = layer.attention
        kind = params.sliding_window, params.soft_cap, params.sinks is None, cache.k.shape
        kinds[kind] = params, cache
    for params, cache in kinds.values():
        q = torch.zeros(1, spec.num_heads, cache.k.shape[-1], dtype=decoder.dtype, device=decoder.device)
        decoder.kernels.warm_up(q, cache, params, min(spec.max_context, capacity))


def measure(decoder: Decoder, block_size: int, meter: Meter) -> MemoryProfile:
    """Measure and time two full prefills, the second twice as long; shorter ones if the device lacks memory."""
    longest = max(1, decoder.spec.max_context // 2)
    many, few = (min(n, longest) for n in PROFILE_ROWS)
    try:
        return _measure(decoder, block_size, meter, many)
    except DeviceError:
        return _measure(decoder, block_size, meter, few)


def _measure(decoder: Decoder, block_size: int, meter: Meter, num_rows: int) -> MemoryProfile:
    _prefill(decoder, num_rows, block_size)  # not measured: compiles kernels and allocates work spaces
    activations = []
    for n in (num_rows, 2 * num_rows):
        blocks, prefill = -(-n // block_size), partial(_prefill, decoder, n, block_size)
        kv = bytes_per_token(decoder) * blocks * block_size
        activations.append(meter.peak(prefill) - kv)
    times = [_timed(decoder, n, block_size) for n in sorted({min(num_rows, *PROFILE_ROWS), num_rows, 2 * num_rows})]
    per_row = max(1.0, (activations[1] - activations[0]) / num_rows)
    states = 0 if decoder.state_layout is None else STATES * decoder.state_layout.num_bytes
    fixed = states + max(0, int(activations[1] - 2 * num_rows * per_row))
    return MemoryProfile(meter.total, meter.used(), fixed, int(per_row) + 1, tuple(times))


def _timed(decoder: Decoder, num_rows: int, block_size: int) -> tuple[int, float]:
    """Return (rows, seconds) of a full prefill. The first one of a length also chooses kernels for it."""
    _prefill(decoder, num_rows, block_size)
    begin = mark(decoder.device)
    _prefill(decoder, num_rows, block_size)
    return num_rows, DeviceTime().plus(begin, mark(decoder.device)).seconds


def blocks_that_fit(
    profile: MemoryProfile,
    utilization: float,
    kv_bytes_per_token: float,
    context: int,
    block_size: int,
    num_prompts: int = 1,
) -> int:
    """Return the number of blocks of the pool: at most for `num_prompts` prompts of the model's whole context, one more
    (the full prefill of --verify) and a spare block.

    Every token needs its KV and, in a full prefill, its row of activations. Raises DeviceError if nothing fits.
    """
    room = utilization * profile.total - profile.used - profile.fixed
    most = (num_prompts + 1) * context
    tokens = min(int(room // (kv_bytes_per_token + profile.per_row)), most + block_size)
    if tokens < 2 * block_size:
        raise DeviceError(
            f"no room for KV: of the GPU's {gib(profile.total)}, {gib(profile.used)} are in use (the weights among them), "
            f"a prefill takes {gib(profile.fixed)} and more, and --gpu-memory-utilization is {utilization:g}",
            "stop other programs on the GPU, raise --gpu-memory-utilization, or use a smaller model or --device cpu",
        )
    return -(-tokens // block_size) if tokens >= most else tokens // block_size


def out_of_memory(
    error: BaseException, device: torch.device, num_tokens: int, memory: DeviceMemory | None
) -> DeviceError:
    """Return the error for a prefill that ran out of memory. Its hint says what would fit."""
    hint = "ask with fewer chunks, or use --device cpu"
    clear_frames(error.__traceback__)  # the frames hold the failed prefill's tensors
    if memory is not None and memory.profile is not None and device.type == "cuda":
        torch.cuda.empty_cache()
        fits = max(0, int((torch.cuda.mem_get_info(device)[0] - memory.profile.fixed) // memory.profile.per_row))
        hint = (
            f"about {min(fits, memory.num_tokens)} tokens would fit: ask with fewer chunks, stop other programs on the GPU, "
            "or lower --gpu-memory-utilization, which leaves more room beside the pool"
        )
    return DeviceError(f"{device} ran out of memory in a prefill of {num_tokens} tokens", hint)


@torch.inference_mode()
def _prefill(decoder: Decoder, num_tokens: int, block_size: int) -> None:
    """Run a full prefill in its own pool. Raises DeviceError if it does not fit."""
    try:
        sequence = KVPool.of(decoder, -(-num_tokens // block_size), block_size).new_sequence(num_tokens)
        plan = plan_prompt([], [], [0] * num_tokens, prefix_key=None, reuse=False)
        policy = BlendPolicy(make_selector("none"), ((1, 0.0),))
        blended_prefill(Prompt(decoder, plan, sequence, KVLoader()), policy)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{decoder.device} has no room beside the weights for a prefill of {num_tokens} tokens",
            "stop other programs on the GPU, or use a smaller model or --device cpu",
        ) from error
