"""The fake GPU finds planted faults, and nothing where there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_kernels.interface import KernelError, LayerCache, Slots
from cacheblend_kernels.triton_backend import norms
from cacheblend_kernels.triton_backend.backend import TritonBackend
from fake_gpu import DeviceTensor, FakeGpu, PinnedTensor, compute_with_torch, installed, watch_launches
from fake_gpu.device import Event, Stream
from fake_gpu.order import Accesses, Region
from gpu_engine import Setup, engine_gpu, waits

from cacheblend_cli.kv import transfer
from cacheblend_cli.kv.pool import to_host, upload
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with installed() as gpu, pytest.MonkeyPatch.context() as patch:
        watch_launches(gpu, patch)
        compute_with_torch(gpu, patch, TritonBackend)
        yield gpu


def on_device(*values: float) -> torch.Tensor:
    return upload(torch.tensor(values or (1.0, 2.0, 3.0, 4.0)), CUDA, torch.float32)


def messages(gpu: FakeGpu) -> list[str]:
    return [message for _, message, _ in gpu.errors]


# Order over streams


def test_work_of_two_streams_without_a_wait_is_a_race(gpu: FakeGpu) -> None:
    x, side = on_device(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    assert any(m.startswith("race: write on stream") for m in messages(gpu))


@pytest.mark.parametrize("wait", ["stream", "event", "event of the stream", "host"])
def test_a_wait_orders_it(gpu: FakeGpu, wait: str) -> None:
    x, side, event = on_device(), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    if wait == "stream":
        side.wait_stream(torch.cuda.current_stream())
    elif wait == "event":
        side.wait_event(event)
    elif wait == "event of the stream":
        torch.cuda.current_stream().record_event().wait(side)
    else:
        event.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    assert x.tolist() == [2, 3, 4, 5]
    assert not gpu.errors


def test_an_event_orders_what_was_queued_before_it(gpu: FakeGpu) -> None:
    x, side, event = on_device(), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    x.mul_(2)
    side.wait_event(event)
    with torch.cuda.stream(side):
        x + 1
    assert any(m.startswith("race: read on stream") for m in messages(gpu))


def test_reads_of_two_streams_need_no_order_and_a_write_after_them_does(gpu: FakeGpu) -> None:
    x, side = on_device(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    x + 1
    assert not gpu.errors
    x.zero_()
    assert any("is not ordered after a read" in m for m in messages(gpu))


@pytest.mark.parametrize(("rows", "races"), [((2, 3), False), ((1, 2), True)])
def test_rows_of_one_tensor_are_told_apart(gpu: FakeGpu, rows: tuple[int, ...], races: bool) -> None:
    x = torch.zeros(4, 8, device=CUDA)
    values, first, second = torch.ones(2, 8, device=CUDA), upload([0, 1], CUDA), upload(rows, CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x.index_copy_(0, first, values)
    with torch.cuda.stream(side):
        x.index_select(0, second)
    assert bool(gpu.errors) is races


def test_regions_overlap_where_their_bytes_do() -> None:
    rows = Region(0, 64, 8, frozenset({0, 2}))
    assert rows.overlaps(Region(16, 17))
    assert not rows.overlaps(Region(8, 16))
    assert not rows.overlaps(Region(0, 64, 8, frozenset({1})))
    assert rows.overlaps(Region(8, 64, 8, frozenset({1})))  # another geometry: not told apart
    accesses = Accesses()
    accesses.add(Region(0, 64), False, 1, 5)
    accesses.add(Region(0, 64), True, 2, 1)
    assert accesses.conflicts(Region(0, 8), False, {}) == [("write", 2)]
    assert not accesses.conflicts(Region(0, 8), False, {2: 1})


def test_memory_that_another_stream_uses_is_freed_with_record_stream(gpu: FakeGpu) -> None:
    for recorded in (True, False):
        x, side = on_device(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        if recorded:
            x.record_stream(side)
        del x
        assert bool(gpu.errors) is not recorded
    assert messages(gpu)[0].startswith("freed while stream")


def test_pinned_memory_is_touched_after_its_copies(gpu: FakeGpu) -> None:
    x, done = on_device(), torch.cuda.Event()
    host = to_host(x)
    done.record()
    done.synchronize()
    assert host.tolist() == [1, 2, 3, 4]
    x.copy_(host, non_blocking=True)
    assert not gpu.errors
    host.fill_(0)
    assert any(m.startswith("race: the host writes to pinned memory") for m in messages(gpu))
    gpu.clear()
    assert int(to_host(x)[0]) == 1
    assert any(m.startswith("race: the host reads pinned memory") for m in messages(gpu))


def test_times_of_events_are_read_after_them(gpu: FakeGpu) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    on_device()
    end.record()
    start.elapsed_time(end)
    assert messages(gpu) == ["elapsed_time of an event that may not have happened"]
    gpu.clear()
    end.synchronize()
    assert start.elapsed_time(end) == 1.0
    assert not gpu.errors
    assert sum(gpu.found("event wait").values()) == 1
    assert not waits(gpu)


# Waiting and copying

INDEX = torch.tensor([0, 2])
WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "values by a mask": lambda x: x.masked_select(x > 1),
    "tensor written by a mask": lambda x: x.__setitem__(x > 1, x[:3].clone()),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "isin": lambda x: torch.isin(x, x.repeat(8)),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "cholesky": lambda x: torch.linalg.cholesky(torch.diag(x)),
    "blocking copy from pinned memory": lambda x: torch.ones(4).pin_memory().to(CUDA),
    "copy to pageable memory": lambda x: torch.ones(4).copy_(x, non_blocking=True),
    "copy to pinned memory of another dtype": lambda x: torch.ones(4).double().pin_memory().copy_(x, non_blocking=True),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}
PAGEABLE: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: torch.tensor([1, 2], device=CUDA),
    "as_tensor": lambda x: torch.as_tensor([1, 2], device=x.device),
    "to": lambda x: torch.ones(4).to(CUDA, non_blocking=True),
    "cuda": lambda x: torch.ones(4).cuda(),
    "copy_": lambda x: x.copy_(torch.ones(4)),
    "pinned memory of another dtype": lambda x: torch.ones(4).pin_memory().to(CUDA, torch.float64, non_blocking=True),
    "strided pinned memory": lambda x: torch.ones(8).pin_memory()[::2].to(CUDA, non_blocking=True),
    "a list as index": lambda x: x[[0, 2]],
    "an index on the host": lambda x: x[INDEX],
    "new_tensor": lambda x: x.new_tensor([1.0]),
}
QUEUED: dict[str, Callable[[torch.Tensor], Any]] = {
    "upload": lambda x: upload([1, 2, 3], CUDA),
    "to_host": to_host,
    "scalars": lambda x: torch.where(x > 1, x * 2, 0.5) + 3,
    "zeros": lambda x: (torch.zeros(3, device=CUDA), x.new_zeros(2), torch.zeros_like(x), torch.arange(4, device=CUDA)),
    "selection": lambda x: (x.sort(), x.topk(2), x.argsort(), x.cumsum(0), x.max(0), torch.searchsorted(x, x)),
    "a scalar written by a mask": lambda x: (x.__setitem__(x > 1, 0.0), x.masked_fill(x > 1, 0.0)),
    "an index": lambda x: x[upload([0, 2], CUDA)],
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones_like(x).long(), output_size=4),
    "a few elements of a large set": lambda x: torch.isin(x.repeat(2000), x),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(torch.diag(x)).L,
    "a draw": lambda x: (x / torch.empty_like(x).exponential_(1, generator=torch.Generator(CUDA))).argmax(-1),
    "an empty tensor": lambda x: torch.tensor([], device=CUDA),
    "event": lambda x: torch.cuda.Event().record(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_waiting_is_counted(gpu: FakeGpu, name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = on_device()
        WAITING[name](x)
    assert next(iter(gpu.found("synchronisation"))).startswith("tests/gpu/test_fake_gpu.py:")
    assert not gpu.found("pageable copy")
    assert not gpu.errors


@pytest.mark.parametrize("name", PAGEABLE)
def test_pageable_copies_are_counted(gpu: FakeGpu, name: str) -> None:
    PAGEABLE[name](on_device())
    assert sum(gpu.found("pageable copy").values()) == 1
    assert not gpu.errors


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", QUEUED)
def test_what_is_queued_waits_for_nothing(gpu: FakeGpu, name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        QUEUED[name](on_device())
    assert not waits(gpu)
    assert not gpu.errors


def test_phases_are_those_of_the_functions_on_the_stack() -> None:
    def inner(x: torch.Tensor) -> None:
        x.tolist()

    def outer(x: torch.Tensor) -> None:
        inner(x)

    with installed({outer.__code__: "outer", inner.__code__: "inner"}) as gpu:
        x = on_device()
        outer(x)
        inner(x)
        inner(x)
        x.tolist()
    counts = {phase: n for (phase, kind, _), n in gpu.counts.items() if kind == "synchronisation"}
    assert counts == {"outer": 1, "inner": 2, "other": 1}


# Devices

MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, host: x + host,
    "matmul": lambda x, host: host @ x,
    "cat": lambda x, host: torch.cat((x, host)),
    "where": lambda x, host: torch.where(x > 1, x, host),
    "index_select": lambda x, host: x.index_select(0, host.long()),
    "index of a host tensor": lambda x, host: host[x.long() - 1],
    "index_put": lambda x, host: x.index_put_((x.long() - 1,), host),
    "stack of scalars": lambda x, host: torch.stack((x[0], host[0])),
}


@pytest.mark.parametrize("name", MIXED)
def test_devices_are_not_mixed(gpu: FakeGpu, name: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](on_device(), torch.ones(4))


def test_tensors_say_where_they_are(gpu: FakeGpu) -> None:
    x = on_device()
    assert isinstance(x, DeviceTensor)
    assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (CUDA, True, False, 0)
    views = [x[1:], x.view(2, 2).mT, *x.split(2), x.new_empty(2), torch.empty_like(x), x.half(), x.to(torch.int64)]
    assert {t.device for t in views} == {CUDA}
    assert x.to(device="cuda") is x
    host = to_host(x)
    assert isinstance(host, PinnedTensor)
    assert (host.is_pinned(), host.is_cuda, torch.ones(1).is_pinned()) == (True, False, False)
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(NotImplementedError, match="float8"):
        x.to(torch.float8_e4m3fn).index_select(0, upload([0], CUDA))


def test_uninitialised_memory_shows(gpu: FakeGpu) -> None:
    x = torch.empty(4, device=CUDA)
    assert torch.isnan(torch.cat((x, torch.empty_like(x), x.new_empty(2)))).all()


def test_inference_tensors_stay_what_they_are(gpu: FakeGpu) -> None:
    plain = on_device()
    with torch.inference_mode():
        x = torch.zeros(4, device=CUDA)
        plain[:2].add_(1)
        assert x.is_inference()
        assert not plain[:2].is_inference()
    assert x[:2].is_inference()
    assert plain.tolist() == [2, 3, 3, 4]
    with pytest.raises(RuntimeError, match="inference tensor"):
        x.add_(1)


# Kernels


def test_kernels_take_no_host_tensors(gpu: FakeGpu) -> None:
    x, weight = torch.ones(3, 16, device=CUDA), torch.ones(16)
    with pytest.raises(KernelError, match="several devices"):
        norms.rms_norm(x, weight, 1e-6)
    with pytest.raises(ValueError, match="weight_ptr of rms_norm_kernel cannot be accessed"):
        norms._launch_norm(x, x, weight, torch.empty_like(x), 1e-6)


def test_a_backend_checks_launches_and_computes(gpu: FakeGpu) -> None:
    backend = TritonBackend(CUDA)
    host = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    x, residual, weight = (upload(t, CUDA, torch.float32) for t in host)
    out, total = backend.add_rms_norm(x, residual, weight, 1e-6)
    assert total is residual
    assert sum(gpu.found("launch").values()) == 1
    assert torch.equal(residual.cpu(), host[0] + host[1])
    assert torch.allclose(out.cpu(), torch.nn.functional.rms_norm(host[0] + host[1], (16,), host[2], 1e-6))
    with pytest.raises(KernelError):
        backend.act_and_mul(x, "tanh")


@pytest.mark.parametrize(("rows", "races"), [((2, 3), False), ((1, 2), True)])
def test_kernels_touch_slots_of_the_pool(gpu: FakeGpu, rows: tuple[int, ...], races: bool) -> None:
    backend, side = TritonBackend(CUDA), torch.cuda.Stream()
    cache = LayerCache(*(torch.zeros(1, 4, 2, 16, device=CUDA) for _ in range(2)))
    k, table = torch.ones(2, 2, 16, device=CUDA), torch.ones(2, 16, device=CUDA)
    slots = [Slots(upload(own, CUDA), table, table) for own in ((0, 1), rows)]
    side.wait_stream(torch.cuda.current_stream())
    backend.rope_and_cache(None, k, k, cache, slots[0])
    with torch.cuda.stream(side):
        backend.rope_and_cache(None, k, k, cache, slots[1])
    assert bool(gpu.errors) is races


# Graphs


def test_a_graph_repeats_what_was_captured(gpu: FakeGpu) -> None:
    x, out, graph = on_device(), torch.zeros(4, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        out.copy_(y + torch.ones(4, device=CUDA))
        x.add_(1)
    assert (x.tolist(), out.tolist()) == ([1, 2, 3, 4], [0, 0, 0, 0])
    graph.replay()
    assert (x.tolist(), out.tolist()) == ([2, 3, 4, 5], [3, 5, 7, 9])
    x.zero_()
    graph.replay()
    assert out.tolist() == [1, 1, 1, 1]
    assert not gpu.errors


def test_a_captured_kernel_reads_what_is_there_at_the_replay(gpu: FakeGpu) -> None:
    backend, graph = TritonBackend(CUDA), torch.cuda.CUDAGraph()
    x, residual, weight = torch.ones(3, 16, device=CUDA), torch.zeros(3, 16, device=CUDA), torch.ones(16, device=CUDA)
    with torch.cuda.graph(graph):
        out, _ = backend.add_rms_norm(x, residual, weight, 0.0)
    assert not residual.any().item()
    x.fill_(3.0)
    graph.replay()
    graph.replay()
    assert residual.unique().tolist() == [6.0]
    assert out.unique().tolist() == [1.0]


FORBIDDEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "mask": lambda x: x[x > 1],
    "tensor": lambda x: torch.tensor([1.0], device=CUDA),
    "pageable copy": lambda x: x.copy_(torch.ones(4)),
    "upload": lambda x: upload([1], CUDA),
    "pinned allocation": lambda x: torch.empty(4, pin_memory=True),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_waits_for_nothing_and_copies_nothing(gpu: FakeGpu, name: str) -> None:
    x = on_device()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        FORBIDDEN[name](x)
    assert any("in a capture" in message for message in messages(gpu))


def test_a_capture_waits_for_no_event_from_outside(gpu: FakeGpu) -> None:
    x, event = on_device(), torch.cuda.Event()
    event.record()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        event.wait()
        x.add_(1)
    assert messages(gpu) == ["a capture waits for an event from outside"]


def test_a_replay_is_ordered_as_other_work(gpu: FakeGpu) -> None:
    x, graph, side = on_device(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        x.add_(1)
    with torch.cuda.stream(side):
        graph.replay()
    assert any(m.startswith("race") for m in messages(gpu))


# The engine


def break_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer.CudaTransfer, "join", lambda *given: None)


def break_order_of_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "wait_event", lambda *given: None)


def break_first_transfer(patch: pytest.MonkeyPatch) -> None:
    """Does not wait for the work queued before, nor lets that behind it wait."""
    patch.setattr(Stream, "wait_stream", lambda *given: None)


def break_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer.CudaTransfer, "copied", lambda *given: None)


def break_fetch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Event, "synchronize", lambda *given: None)


@pytest.mark.parametrize(
    "fault", [None, break_join, break_order_of_copies, break_first_transfer, break_buffers, break_fetch]
)
def test_a_forgotten_wait_of_the_engine_is_found(fault: Any, tmp_path: Path) -> None:
    settings = {"host_cache": 0.0} if fault is break_buffers else {}  # chunks have no buffers of their own
    setup = Setup.write(tmp_path, model={"num_hidden_layers": 3}, **settings)
    with engine_gpu() as gpu, setup.store() as store, pytest.MonkeyPatch.context() as patch:
        engine = setup.engine("cuda")
        keys = setup.precompute(engine, store)
        engine.runtime.memory()
        assert not gpu.errors
        if fault is not None:
            fault(patch)
        blend, sampling = BlendParams(ratio=0.3, selector="hkvd"), SamplingParams(max_tokens=2, ignore_eos=True)
        engine.run_alone(store, AskRequest("what is it?", keys, blend, sampling))
        assert any(message.startswith("race") for message in messages(gpu)) is (fault is not None)


def test_nothing_is_left_behind() -> None:
    names = ("empty", "tensor", "zeros_like", "Generator", "inference_mode")
    before = [getattr(torch, name) for name in names], torch.cuda.is_available(), dict(vars(torch.cuda))
    methods = [getattr(torch.Tensor, name) for name in ("to", "cuda", "pin_memory", "is_pinned", "new_zeros")]
    with installed():
        transfer._streams(CUDA)
        assert torch.cuda.is_available()
    assert ([getattr(torch, name) for name in names], torch.cuda.is_available(), dict(vars(torch.cuda))) == before
    assert [getattr(torch.Tensor, name) for name in ("to", "cuda", "pin_memory", "is_pinned", "new_zeros")] == methods
    assert isinstance(transfer._streams, functools._lru_cache_wrapper)
    assert transfer._streams.cache_info().currsize == 0
