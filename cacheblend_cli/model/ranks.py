"""Ranks: processes that compute one model together, and their communication (torch.distributed)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.model.parallel import OneRank

EXCHANGE_S = 300.0
"""Maximum seconds that a rank waits for the others in one exchange: longer than the slowest layer, and than compiling
its kernels."""
IDLE = timedelta(days=365)  # between two messages
WAIT_S = 0.01


class RankLost(DeviceError):
    """A rank died or hangs, so the model cannot compute any more."""


class Ranks(OneRank):
    """This process among the ranks. All ranks call the same methods in the same order, with tensors of the same shapes.

    - device: device of exchanged tensors, by NCCL on GPUs and gloo on CPUs; messages always go by gloo
    - lost: returns the error of a failed exchange, given the reason
    - failed: called when this rank alone fails in the middle of a computation
    - exchanges: number of exchanges this rank has begun; odd while it waits for the others
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Requires the default process group."""
        self.rank, self.size, self.device = rank, size, device
        self._messages = dist.new_group(backend="gloo", timeout=IDLE)
        timeout = timedelta(seconds=EXCHANGE_S)
        self._data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        self.lost: Callable[[str], RankLost] = lambda reason: RankLost(f"the ranks lost each other: {reason}")
        self.failed: Callable[[BaseException], None] = lambda error: None
        self.exchanges = 0
        self.lock = threading.RLock()  # held while sending a message, until its computation is done

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in place where possible, equal to the bit on every rank. On a CPU the sum of
        an element does not depend on its place in the tensor: with three or more ranks, gloo would start each part at
        another rank."""
        if not x.numel():
            return x
        x = x.contiguous()
        if self.size > 2 and not x.is_cuda:
            parts = self._gathered(x)
            torch.add(parts[0], parts[1], out=x)
            for part in parts[2:]:
                x += part
            return x
        self._run(lambda: dist.all_reduce(x, group=self._data))
        return x

    def largest(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        x = x.contiguous()
        self._run(lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=self._data))
        return x

    def wait(self, number: int) -> int:
        """Wait for all ranks without a limit, for example while they read weights. Returns their largest number."""
        found = torch.tensor([number])
        try:
            work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self._messages, async_op=True)
            while not work.is_completed():  # polling, so that Ctrl-C works
                time.sleep(WAIT_S)
            work.wait()
        except RuntimeError as error:
            raise self.lost(str(error)) from error
        return int(found)

    def gather(self, x: Tensor, dim: int, every: int = 1) -> Tensor:
        """Return the tensors of ranks 0, `every`, 2 * `every`, ... concatenated along a dimension."""
        return torch.cat(self._gathered(x)[::every], dim) if x.numel() else x

    def of_first(self, index: Tensor) -> Tensor:
        """Return rank 0's index, [n] int64. The other ranks need not know its length."""
        size = torch.tensor([len(index)], device=index.device)
        self.share(size)
        index = index.new_empty(int(size)) if self.rank else index.contiguous()
        self.share(index)
        return index

    def share(self, x: Tensor) -> None:
        """Overwrite x with rank 0's x; contiguous, the same shape on all ranks."""
        if x.numel():
            self._run(lambda: dist.broadcast(x, 0, group=self._data))

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message from rank 0 to all others. On the others, which run the same code, it sends nothing."""
        if self.rank == 0:
            self.send(msgspec.msgpack.encode(message))

    @contextmanager
    def telling(self, message: msgspec.Struct) -> Iterator[None]:
        """`tell`, then run the computation that the message requests. An error on rank 0 alone is reported to `failed`;
        the others do not know of it."""
        with self.lock:
            self.tell(message)
            try:
                yield
            except BaseException as error:
                if self.rank == 0 and not is_agreed(error):
                    self.failed(error)
                raise

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all others."""
        self._broadcast(torch.tensor([len(message)]))
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Wait for rank 0's next message; an empty one is the last."""
        size = torch.empty(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            self._broadcast(data)
        return data.numpy().tobytes()

    def _broadcast(self, x: Tensor) -> None:
        try:
            dist.broadcast(x, 0, group=self._messages)
        except RuntimeError as error:
            raise self.lost(str(error)) from error

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        x = x.contiguous()
        self._run(lambda: dist.all_gather(parts, x, group=self._data))
        return parts

    def _run(self, exchange: Callable[[], object]) -> None:
        self.exchanges += 1
        try:
            exchange()
        except RuntimeError as error:
            raise self.lost(str(error)) from error
        self.exchanges += 1


def is_agreed(error: BaseException) -> bool:
    """Return whether all ranks raise the error at the same place, because they got its cause or agreed on it."""
    return isinstance(error, UsageError) or getattr(error, "is_agreed", False)
