"""The order of a GPU's copies, writes and reads, on a device that runs them as late and as mixed up as it may."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import DeviceTensor, FakeCuda, FakeEvent, FakeStream

from cacheblend_cli.kv.transfer import CudaTransfer

NUM_LAYERS, BATCHES, BUFFERS, SIZE = 5, 3, 2, 4


class Disorder(AssertionError):
    """Memory was read before it was written, or after it was overwritten."""


def load(cuda: FakeCuda, given_up_in: int = NUM_LAYERS) -> CudaTransfer:
    """Every layer's batches through two buffers while the compute stream reads layer after layer, or no layer from the
    one on in which loading is given up."""
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
    transfer.open(BUFFERS, SIZE)

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
            transfer.memory(number % BUFFERS)[:] = bytes([number] * SIZE)
            cuda.some()
            transfer.send(layer, number % BUFFERS, SIZE, lambda staged, number=number: place(number, staged))
            cuda.some()
        if layer == given_up_in:
            break
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


@pytest.mark.parametrize(
    ("of", "forgotten"), [(FakeStream, "wait_event"), (FakeStream, "wait_stream"), (FakeEvent, "synchronize")]
)
def test_a_wait_that_is_missing_is_found_out(of: type, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any one kind of wait left out anywhere gives disorder for some order of execution."""
    for seed in range(60):
        cuda = FakeCuda(seed)
        with monkeypatch.context() as without:
            without.setattr(of, forgotten, lambda *of_it: None)
            cuda.install(without)
            try:
                load(cuda)
            except Disorder:
                return
    pytest.fail(f"without {forgotten} nothing went wrong")


def test_prompts_take_no_new_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 32, and graphs are captured on one of them."""
    cuda = FakeCuda(0)
    cuda.install(monkeypatch)
    for _ in range(3):
        load(cuda)
    assert len(cuda.streams) == 1 + 2
