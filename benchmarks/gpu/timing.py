"""Time device work: CUDA graphs over several input sets, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def median_seconds(calls: Sequence[Call], device: torch.device, *, reps: int = 20, graph: bool = True) -> float:
    """Return the median time of one call. `calls` do the same work on different inputs, together larger than the cache.

    On CUDA all of them are captured into one graph, so that launches leave no gaps, and `reps` replays are timed with
    events (graph=False: launched one by one). On the CPU they run in turn, timed by the host's clock.
    """
    if device.type != "cuda":
        times = []
        for _ in range(1 + reps):
            start = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) / len(calls)
    _warm_up(calls, device)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            kept = [call() for call in calls]
        run: Call = captured.replay
    else:
        kept = []

        def run() -> None:
            for call in calls:
                call()

    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for start_event, stop_event in events:
        start_event.record()
        run()
        stop_event.record()
    torch.cuda.synchronize(device)
    del kept
    return statistics.median(a.elapsed_time(b) for a, b in events) / 1e3 / len(calls)


def _warm_up(calls: Sequence[Call], device: torch.device) -> None:
    """Compile and load every kernel on a side stream, as graph capture requires."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)


def num_input_sets(bytes_a_call: int, device: torch.device, *, most: int = 16) -> int:
    """Return the number of input sets to rotate so that none is still in the last-level cache at its turn."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(most, -(-3 * cache // max(1, bytes_a_call))))
