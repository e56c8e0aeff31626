"""From host threads to a device that computes: staging buffers, and who may write to which of them when.

What is loaded is cut into *batches* (a layer's chunks, or as many of them as a buffer holds), numbered in the order in
which the layers are computed. Threads fill the parts of a batch; one submitter queues its copy to the device.

| slot b % num_slots holds batch b | owner                                                          |
|----------------------------------|----------------------------------------------------------------|
| until the copy of b - num_slots has been made | the device, which still reads the batch before    |
| until all parts of b are filled  | the threads                                                    |
| until b is submitted             | the submitter                                                  |
| until the copy's event has fired | the device                                                     |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Something the device reaches after the work queued before it."""

    def synchronize(self) -> None:
        """Wait on the host until it is reached."""
        ...


class StagingRing:
    """The order of fills, submissions and reuse. It holds no memory: slots are numbers.

    num_parts: how many parts each batch has, all above 0.
    """

    def __init__(self, num_slots: int, num_parts: Sequence[int]) -> None:
        self._num_slots = num_slots
        self._missing = list(num_parts)
        self._events: list[Event | None] = [None] * num_slots  # of the slot's last submitted batch
        self._submitted = 0
        self._stopped = False
        self._changed = threading.Condition()

    def acquire(self, batch: int) -> int | None:
        """The batch's slot, once nothing reads the batch before it there any more. None: stopped. Parts are acquired in
        the order of their batches, by any number of threads."""
        slot = batch % self._num_slots
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._submitted > batch - self._num_slots)
            if self._stopped:
                return None
            event = self._events[slot]
        if event is not None:
            event.synchronize()
        return slot

    def filled(self, batch: int) -> None:
        """One more part of the batch is in its slot."""
        with self._changed:
            self._missing[batch] -= 1
            if self._missing[batch] == 0:
                self._changed.notify_all()

    def wait_filled(self, batch: int) -> int | None:
        """For the submitter, batch after batch: the slot, once all parts are in it. None: stopped."""
        assert batch == self._submitted, "batches are submitted in order"
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._missing[batch] == 0)
            return None if self._stopped else batch % self._num_slots

    def submitted(self, batch: int, event: Event) -> None:
        """The copy of the batch is queued, and the event behind it."""
        with self._changed:
            self._events[batch % self._num_slots] = event
            self._submitted = batch + 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Transfer(Protocol):
    """Moves filled slots to the device beside what it computes. `host[slot]` is uint8 [slot_bytes] for the threads."""

    host: list[Tensor]

    def open(self, num_slots: int, slot_bytes: int) -> None:
        """Make the buffers. What is sent starts after the work queued so far."""
        ...

    def send(self, slot: int, num_bytes: int, place: Callable[[Tensor], None]) -> Event:
        """Queue the copy of host[slot][:num_bytes] and, behind it, place(the copy). The event frees host[slot]."""
        ...

    def finish_layer(self, layer: int) -> None:
        """All of the layer has been sent."""
        ...

    def arrive(self, layer: int) -> None:
        """The compute stream gets to the layer; from here on what it waits counts as stall."""
        ...

    def join(self, layer: int) -> None:
        """The compute stream waits for the layer, the host does not. After `finish_layer(layer)`."""
        ...

    def close(self) -> None:
        """The compute stream waits for whatever was sent, and the buffers go."""
        ...

    def seconds(self) -> tuple[float, float]:
        """(from `open` to the last layer's KV, of it waited by the compute stream). Waits for the device."""
        ...


class CudaTransfer:
    """A copy stream, and a stream that dequantises, rotates and writes into the pool behind it; an event a layer.

    Pinned and device buffers come from PyTorch's caching allocators, so a second prompt makes none anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # the write into the pool goes before the blocks of a layer that is computed: the next layer needs it soon
        self._copy, self._place = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
        self._compute = torch.cuda.current_stream(device)
        self.host: list[Tensor] = []
        self._staged: list[Tensor] = []
        self._placed: list[torch.cuda.Event | None] = []
        self._layers: dict[int, torch.cuda.Event] = {}
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._arrived: torch.cuda.Event | None = None
        self._started: torch.cuda.Event | None = None

    def open(self, num_slots: int, slot_bytes: int) -> None:
        size = num_slots * slot_bytes
        self.host = list(torch.empty(size, dtype=torch.uint8, pin_memory=True).split(slot_bytes))
        self._staged = list(torch.empty(size, dtype=torch.uint8, device=self._device).split(slot_bytes))
        self._placed = [None] * num_slots
        self._copy.wait_stream(self._compute)  # the pool's blocks and the buffers may still be in use
        self._place.wait_stream(self._compute)
        self._started = self._timed(self._copy)

    def send(self, slot: int, num_bytes: int, place: Callable[[Tensor], None]) -> Event:
        staged, placed = self._staged[slot][:num_bytes], self._placed[slot]
        with torch.cuda.stream(self._copy):
            if placed is not None:
                self._copy.wait_event(placed)
            staged.copy_(self.host[slot][:num_bytes], non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # threads wait for it, and a core that spins is one that loads nothing
        copied.record(self._copy)
        with torch.cuda.stream(self._place):
            self._place.wait_event(copied)
            place(staged)
        self._placed[slot] = self._place.record_event()
        return copied

    def finish_layer(self, layer: int) -> None:
        self._layers[layer] = self._timed(self._place)

    def arrive(self, layer: int) -> None:
        self._arrived = self._timed(self._compute)

    def join(self, layer: int) -> None:
        self._compute.wait_event(self._layers[layer])
        assert self._arrived is not None, "arrive comes first"
        self._waits.append((self._arrived, self._timed(self._compute)))

    def close(self) -> None:
        """The device buffers were taken on the compute stream: who gets them next there comes after what is waited for
        here. Of the pinned ones PyTorch keeps events behind the copies that read them."""
        self._compute.wait_stream(self._copy)
        self._compute.wait_stream(self._place)
        self.host, self._staged = [], []

    def seconds(self) -> tuple[float, float]:
        if self._started is None or not self._layers:
            return 0.0, 0.0
        last = self._layers[max(self._layers)]
        for event in (last, *(end for _, end in self._waits)):
            event.synchronize()
        stall = sum(begin.elapsed_time(end) for begin, end in self._waits)
        return self._started.elapsed_time(last) / 1e3, stall / 1e3

    def _timed(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
