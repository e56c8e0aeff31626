"""Speeds of this machine with a model: measured once, kept in the user's cache, updated by each prefill."""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from cacheblend_cli import user_cache
from cacheblend_cli.blend.corrections import Regression
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.forward import KVOnly, Steps, finish, layer_by_layer
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.rows import rows_alone
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.description import Loaded
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.prompt.plan import PromptPlan, Segment
from cacheblend_cli.types import Speeds

FORMAT = 4
PROBE_ROWS = (8, 32, 128, 512, 1024)
PROBE_S = 1.0
"""Seconds for all measurements of compute; sizes that take longer are left out."""
MOVED_ROWS, CHUNK_ROWS, KNOWN_EVERY = 1024, 256, 7
"""Measurement of a correction: rows, rows per chunk, and the step between recomputed rows."""
_decode = msgspec.json.Decoder(Speeds).decode


def speed_file(model: Loaded, codec: str, num_tokens: int = 0) -> Path:
    """Return the path of the speeds of a model on this machine, device, number of threads and KV dtype, in JSON.
    num_tokens: on a GPU, length of the blended prompts that they are for; 0: speeds of full prefills."""
    decoder = model.decoder
    device: list[Any] = [str(decoder.device), platform.node(), platform.machine(), os.cpu_count()]
    if decoder.device.type == "cuda":
        device += [torch.cuda.get_device_name(decoder.device), num_tokens]
    pool = "auto" if decoder.kv_scales is None else "float8"
    identity = [FORMAT, model.fingerprint, decoder.kernels.name, codec, pool, torch.get_num_threads(), *device]
    return user_cache.place("speeds", *identity)


def read_speeds(file: Path) -> Speeds | None:
    """Return the speeds, None if the file is missing or invalid."""
    try:
        speeds = _decode(user_cache.recall(file))
    except msgspec.MsgspecError:
        return None
    valid = min(vars(speeds).values()) >= 0 and speeds.row_s > 0 and speeds.bytes_per_s > 0
    return speeds if valid else None


def write_speeds(file: Path, speeds: Speeds) -> None:
    finite = {name: value for name, value in vars(speeds).items() if math.isfinite(value)}  # JSON has no infinity
    user_cache.keep(file, json.dumps(finite))


def kv_share(spec: ModelSpec) -> float:
    """Return the share of K and V in a row's multiplications in a layer."""
    heads, *dims = spec.kv_shapes[0]
    kv = spec.hidden_size * heads * (dims[0] + dims[-1])
    if (latent := spec.latent) is None:
        rest = 2 * spec.hidden_size * spec.num_heads * spec.head_dim
    else:
        made = spec.num_heads * latent.rank * (latent.nope_dim + latent.value_dim)
        of_queries = (spec.hidden_size + spec.q_size) * latent.query_rank or spec.hidden_size * spec.q_size
        rest = of_queries + made + spec.hidden_size * spec.num_heads * latent.value_dim
    return kv / (kv + rest + spec.mlp_params)


@torch.inference_mode()
def measure_compute(decoder: Decoder, block_size: int, seconds: float = PROBE_S) -> Speeds:
    """Time prefills of rising length through one layer and K and V of the next, and fit a layer's cost."""
    spec = decoder.spec
    depth = min(2, spec.num_kv_layers)
    shallow = copy.copy(decoder)  # the same weights, its first layers only
    shallow.layers = decoder.layers[:depth]
    shallow.spec = replace(
        spec,
        num_layers=depth,
        sliding_windows=spec.sliding_windows[:depth],
        shapes=None if spec.shapes is None else spec.shapes.first(depth),
    )
    spent = 0.0
    found: list[tuple[int, float]] = []
    for num_rows in PROBE_ROWS:
        if num_rows > spec.max_context:
            break
        left = seconds - spent
        if len(found) > 1 and found[-1][1] * num_rows / found[-1][0] * 3 > left:
            break
        times = _runs(_layers_run(shallow, num_rows, block_size), decoder, left / 3)
        found.append((num_rows, statistics.median(times[1:])))
        spent += sum(times)
    layers = depth - 1 + kv_share(spec) if depth > 1 else 1.0
    layer_s, row_s, pair_s = fit([n for n, _ in found], [t / layers for _, t in found])
    hidden = torch.zeros(1, *spec.row_shape, dtype=decoder.dtype, device=decoder.device)
    times = _runs(lambda: decoder.logits(hidden, hidden), decoder, seconds / 10)
    moved_s = _moved_row_s(shallow, block_size, seconds / 20)
    return Speeds(layer_s, row_s, pair_s, statistics.median(times[1:]), moved_s=moved_s)


def full_speeds(spec: ModelSpec, times: Sequence[tuple[int, float]]) -> Speeds:
    """Return the speeds of full prefills. times: (rows, seconds) of each."""
    once, row_s, pair_s = fit([n for n, _ in times], [seconds for _, seconds in times])
    layers = spec.num_kv_layers  # the last computes K and V of all rows, and the rest of one
    return Speeds(once / layers, row_s / (layers - 1 + kv_share(spec)), pair_s / max(1, layers - 1), head_s=0.0)


def fit(rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit (layer_s, row_s, pair_s), not negative, to the seconds of causal prefills, by relative error. rows: of
    each."""
    n = np.asarray(rows, dtype=np.float64)
    columns = np.stack((np.ones_like(n), n, n * (n + 1) / 2), axis=1)
    weighted = columns / np.asarray(seconds)[:, None]
    best, least = (0.0, float(np.max(np.asarray(seconds) / n)), 0.0), math.inf
    for used in ([1], [0, 1], [1, 2], [0, 1, 2]):
        if len(used) > len(n):
            continue
        solution = np.zeros(3)
        solution[used] = np.linalg.lstsq(weighted[:, used], np.ones_like(n), rcond=None)[0]
        error = float(((weighted @ solution - 1) ** 2).sum())
        if (solution >= 0).all() and solution[1] > 0 and error < least:
            best, least = (float(solution[0]), float(solution[1]), float(solution[2])), error
    return best


def _layers_run(decoder: Decoder, num_rows: int, block_size: int) -> Callable[[], Any]:
    rows = rows_alone(decoder, num_rows, block_size)
    token_ids = torch.zeros(num_rows, dtype=torch.int64, device=decoder.device)
    steps = Steps() if len(decoder.layers) == 1 else KVOnly(decoder, rows)
    return lambda: finish(layer_by_layer(decoder, rows, token_ids, steps))


def _moved_row_s(decoder: Decoder, block_size: int, seconds: float) -> float:
    """Return the seconds per corrected row and layer, by the default correction."""
    from cacheblend_cli.kv.staging import ZeroLoader

    num_rows, spec = min(MOVED_ROWS, decoder.spec.max_context), decoder.spec
    sequence = KVPool.of(decoder, -(-num_rows // block_size), block_size).new_sequence(num_rows)
    plan = PromptPlan((Segment("chunk", 0, (0,) * num_rows, "blended"),))
    loader = ZeroLoader(decoder, sequence, plan, "float16")
    loader.wait(0)
    at = torch.arange(num_rows, device=decoder.device)
    every = Candidates(at, at // CHUNK_ROWS, at % CHUNK_ROWS)
    known = every.take(at[::KNOWN_EVERY])
    correction = Regression(Prompt(decoder, plan, sequence, loader), every, known)
    heads, *dims = spec.kv_shapes[0]
    k, v = (torch.ones(len(known), heads, dims[i], dtype=decoder.dtype, device=decoder.device) for i in (0, -1))
    times = _runs(lambda: correction.apply(decoder.layers[0], k, v), decoder, seconds)
    return statistics.median(times[1:]) / max(1, num_rows - len(known))


def _runs(run: Callable[[], Any], decoder: Decoder, seconds: float) -> list[float]:
    """Return the seconds of a warm-up run and of 1 to 15 more, as many as fit in `seconds`."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < 16 and sum(times) < seconds):
        _synchronize(decoder)
        begin = time.perf_counter()
        run()
        _synchronize(decoder)
        times.append(time.perf_counter() - begin)
    return times


def _synchronize(decoder: Decoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)
