"""The order of a GPU's copies, writes and reads, on a device that runs them as late and as mixed up as it may."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import DeviceTensor, FakeCuda, FakeStream

from cacheblend_cli.kv.staging import CudaTransfer, StagingRing

NUM_LAYERS, BATCHES, SLOTS, SIZE = 5, 3, 2, 4


class Disorder(AssertionError):
    """Something read what was not there yet, or was there no more."""


def load(cuda: FakeCuda, given_up_in: int = NUM_LAYERS) -> CudaTransfer:
    """Every layer's batches through the ring while the compute stream reads layer after layer, or no layer from the one
    on in which loading is given up."""
    pool: dict[int, list[int]] = {}
    ours = [False]  # before and after, pool and device buffers are somebody else's on the compute stream
    for _ in range(100):
        cuda.compute.launch(lambda: None)
    cuda.compute.launch(lambda: ours.__setitem__(0, True))

    def used() -> None:
        if not ours[0]:
            raise Disorder("written while somebody else's")

    cuda.on_copy = used
    transfer = CudaTransfer(torch.device("cuda"))
    transfer.open(SLOTS, SIZE)
    ring = StagingRing(SLOTS, [1] * (NUM_LAYERS * BATCHES))

    def place(number: int, staged: DeviceTensor) -> None:
        def write() -> None:
            used()
            pool[number] = staged.memory.tolist()

        cuda.current.launch(write)

    def read(layer: int) -> None:
        for number in range(layer * BATCHES, (layer + 1) * BATCHES):
            if pool.get(number) != [number] * SIZE:
                raise Disorder(f"batch {number} holds {pool.get(number)}")

    for layer in range(NUM_LAYERS):
        transfer.arrive(layer)
        for number in range(layer * BATCHES, (layer + 1) * BATCHES):
            slot = ring.acquire(number)
            assert slot is not None
            transfer.host[slot].fill_(number)
            ring.filled(number)
            assert ring.wait_filled(number) == slot
            cuda.some()
            event = transfer.send(slot, SIZE, lambda staged, number=number: place(number, staged))
            ring.submitted(number, event)
            cuda.some()
        if layer == given_up_in:
            break
        transfer.finish_layer(layer)
        transfer.join(layer)
        cuda.compute.launch(lambda layer=layer: read(layer))
        cuda.some()
    transfer.close()
    cuda.compute.launch(lambda: ours.__setitem__(0, False))
    cuda.run()
    assert not any(stream.queue for stream in cuda.streams)
    return transfer


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_device_does_first_every_layer_reads_its_own(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(seed)
    cuda.install(monkeypatch)
    assert load(cuda).seconds() == (0.001, NUM_LAYERS * 0.001)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_given_up_is_waited_for_before_its_memory_goes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(seed)
    cuda.install(monkeypatch)
    load(cuda, given_up_in=seed % NUM_LAYERS)


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream"])
def test_a_wait_that_is_missing_is_found_out(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any one kind of wait left out anywhere gives disorder for some order of execution."""
    monkeypatch.setattr(FakeStream, forgotten, lambda self, other: None)
    for seed in range(60):
        cuda = FakeCuda(seed)
        cuda.install(monkeypatch)
        try:
            load(cuda)
        except Disorder:
            return
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(FakeStream, forgotten, lambda self, other: None)
    pytest.fail(f"without {forgotten} nothing went wrong")
