"""Missing KV is computed while no request is in progress, one launch at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cacheblend_cli.cancellation import Cancelled
from cacheblend_cli.collect.collect_lock import collecting_alone
from cacheblend_cli.errors import QueueFull
from cacheblend_cli.model.device import make_current
from cacheblend_cli.model.host_memory import available_memory
from cacheblend_cli.server.api_errors import ApiError
from cacheblend_cli.server.power import on_battery
from cacheblend_cli.server.server_state import ServerState

if TYPE_CHECKING:
    import torch

    from cacheblend_cli.collect.missing import MissingChunks

T = TypeVar("T")
IDLE_S = 1.0  # without a request, before the first launch
LOOK_S = 1.0  # between two checks for work
BETWEEN_S = 0.05  # between two launches: a precompute that waits for the lock gets it
REST_S = 300.0  # after an error
NICE = 10
LEAST_BYTES = 512 << 20  # of available memory
logger = logging.getLogger("cacheblend")


class IdleWork:
    """Computes the KV of missing chunks while the server is idle. A request that comes ends the running launch between
    two layers; it is repeated later."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._owner = state, state.keyring.own
        self._missing = state.engine.missing(state.store, self._owner.salt)
        self._on_battery = self._on_request = self.computing = False
        self._num_done: int | None = None  # chunks since the work began, None before
        self._rest_until, self._last_error = 0.0, ""

    @property
    def num_missing(self) -> int | None:
        """Number of chunks left to compute, None before the store was read, and if this engine computes none."""
        return None if self._missing is None else self._missing.number

    async def finish(self, salt: str, *, on_battery: bool) -> int | None:
        """Keep the server running until the missing chunks are computed. Return their number, None for chunks of a
        salt that is not the engine's."""
        if salt != self._owner.salt:
            return None
        if self._missing is not None:
            await self._state.in_pool(self._owner, self._missing.read_all)
            self._on_request = self._state.finishing = True
            self._on_battery, self._rest_until = self._on_battery or on_battery, 0.0
        return self.num_missing

    async def run(self) -> None:
        """Work until the server stops."""
        while self._missing is not None:
            await asyncio.sleep(BETWEEN_S if self.computing else LOOK_S)
            try:
                if self._state.idle_s >= IDLE_S and time.monotonic() >= self._rest_until:
                    self.computing = await self._advance(self._missing)
                    if not self.computing:
                        self._pause()
                else:
                    self.computing = False
            except Cancelled:  # a request came
                self.computing = False
            except (ApiError, QueueFull):  # the server stops
                return
            except Exception as error:
                self._rest(error)

    async def _advance(self, missing: MissingChunks) -> bool:
        """Run one launch, unless something speaks against it. Return whether it did."""
        state = self._state
        with collecting_alone(state.store) as is_free:
            pass
        if not (is_free and self._may_compute):  # else precompute does the work
            return False
        read = missing.read_all if self._num_done is None else missing.refresh
        if not (num_missing := await state.in_pool(self._owner, read)):
            self._end()
        if not num_missing or state.active:
            return False
        if self._num_done is None:
            self._num_done = 0
            logger.info("computing the KV of %d chunks while idle", num_missing)
        self.computing, state.finishing = True, self._on_request
        work = partial(missing.compute, tuple(state.found))
        num_done = await state.in_engine(partial(_in_background, work, state.engine.model.decoder.device))
        self._num_done += num_done
        return num_done > 0

    @property
    def _may_compute(self) -> bool:
        free = available_memory()
        return (free is None or free >= LEAST_BYTES) and (self._on_battery or not on_battery())

    def _end(self) -> None:
        if self._num_done:
            logger.info("computed the KV of %d chunks while idle", self._num_done)
        self._num_done, self._on_request, self._on_battery, self._last_error = None, False, False, ""

    def _rest(self, error: Exception) -> None:
        """Log an error once, and try again later."""
        self.computing, self._rest_until = False, time.monotonic() + REST_S
        self._pause()
        if (text := getattr(error, "message", f"{type(error).__name__}: {error}")) != self._last_error:
            self._last_error = text
            logger.warning("computing KV while idle failed: %s", text)

    def _pause(self) -> None:
        """Let the server exit if it stays idle."""
        if self._state.finishing:
            self._state.finishing = False
            self._state.used()


def _in_background(work: Callable[[], T], device: torch.device) -> T:
    """Run work in a thread of low priority, which its OpenMP threads inherit, and wait for it. They end with the work:
    with more threads than CPUs, OpenMP waits less actively, and answers would be slower."""

    def lower() -> None:
        with suppress(OSError):  # a system without priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        make_current(device)

    with ThreadPoolExecutor(1, "cacheblend-idle", lower) as background:
        return background.submit(work).result()
