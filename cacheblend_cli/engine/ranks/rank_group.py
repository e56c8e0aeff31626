"""The processes of --tensor-parallel, started by rank 0 or by torchrun. They watch each other.

Once a second, every rank writes a heartbeat and its number of exchanges to a TCPStore. Rank 0 ends all ranks if one
died, is silent for HUNG_S seconds, or does not join an exchange that rank 0 waits in. The others end if rank 0 dies.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from cacheblend_cli.engine.outer_ranks import outer_ranks
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.model.device import make_current
from cacheblend_cli.model.ranks import RankLost, Ranks

BEAT_S, HUNG_S = 1.0, 10.0
BEHIND_S = 60.0  # maximum wait of rank 0 in one exchange for a rank that is alive
START_S = 180.0  # maximum wait for all ranks to start
END_S = 5.0  # maximum wait for them to end
STARTED = "CACHEBLEND_RANK_STARTED"  # in the environment of a rank that rank 0 started
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOST = "all ranks have ended; run the command again"


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank: a GPU each. Raises DeviceError if there are too few."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise DeviceError(f"--tensor-parallel is not implemented on {device.type}", "use --device cuda or cpu")
    number = int(os.environ.get("LOCAL_RANK", rank))
    if number >= torch.cuda.device_count():
        raise DeviceError(
            f"rank {rank} has no GPU: this machine has {torch.cuda.device_count()}", "use a smaller --tensor-parallel"
        )
    return torch.device("cuda", number)


class RankGroup:
    """The other ranks, as seen by rank 0. ranks: communication with them. on_lost: called, in another thread, when one
    is lost."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Start the other ranks, or wait for torchrun's. Raises DeviceError if they do not start."""
        self.size, self.device = size, device
        self.on_lost: Callable[[RankLost], None] = lambda error: None
        self._reason: RankLost | None = None
        self._is_lost, self._ending = threading.Event(), threading.Event()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        make_current(device)
        foreign = dist.is_initialized()
        try:
            self._begin()
        except BaseException:
            self._kill()
            if dist.is_initialized() and not foreign:
                dist.destroy_process_group()
            raise
        self.ranks.lost, self.ranks.failed = self._lost, self.fail
        self._watcher = threading.Thread(target=self._watch, name="cacheblend-ranks", daemon=True)
        self._watcher.start()
        atexit.register(self.close)

    @property
    def is_lost(self) -> bool:
        return self._is_lost.is_set()

    @property
    def has_ended(self) -> bool:
        return self.is_lost or self._ending.is_set()

    def close(self) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        atexit.unregister(self.close)
        with suppress(Exception):
            if not self.is_lost:
                self.ranks.send(b"")
        until = time.monotonic() + END_S
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
        self._kill()
        self._watcher.join(END_S)
        with suppress(Exception):
            dist.destroy_process_group()

    def fail(self, error: BaseException) -> None:
        """Record that rank 0 left an exchange half way: no rank can continue."""
        if not isinstance(error, Exception):  # this process is ending
            self.on_lost = lambda lost: None
        self._found(f"rank 0 failed: {type(error).__name__}: {error}")

    def _begin(self) -> None:
        """Start the ranks, or find torchrun's, and join them."""
        if outer_ranks(self.size) is not None:
            self._store: dist.Store = _outer_store()
        else:
            self._store, port = _loopback_store()
            for rank in range(1, self.size):
                self._children[rank] = self._start(rank, port)
        self._store.set("device", self.device.type)
        self._join()
        with on_loopback() if self._children else nullcontext():
            self.ranks = _joined(self._store, 0, self.size, self.device)

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        own = loopback() | {"RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), STARTED: "1"}  # fmt: skip
        command = [sys.executable, "-P", "-m", "cacheblend_cli.engine.ranks.rank_worker"]
        return subprocess.Popen(command, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _join(self) -> None:
        until = time.monotonic() + START_S
        for rank in range(1, self.size):
            while not self._store.check([f"here/{rank}"]):
                if (dead := self._dead()) or time.monotonic() > until:
                    raise DeviceError(
                        dead or f"rank {rank} did not start within {START_S:.0f} seconds", "see its output above"
                    )
                time.sleep(0.02)

    def _dead(self) -> str | None:
        for rank, child in self._children.items():
            code = child.poll()
            if code is not None:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"rank {rank} (process {child.pid}) {how}"
        return None

    def _watch(self) -> None:
        store: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # a waiting one blocks all other uses
        beats, last_beat = Beats(range(1, self.size)), 0.0
        seen, since = 0, time.monotonic()
        while not self._ending.wait(BEAT_S / 4):
            now, exchanges = time.monotonic(), self.ranks.exchanges
            if exchanges != seen:
                seen, since = exchanges, now
            try:
                if now - last_beat >= BEAT_S:
                    store.set("beat/0", f"{now} {exchanges}")
                    beats.read(store)
                    last_beat = now
            except Exception as error:
                self._found(f"the ranks' store failed: {error}")
            silent, behind = beats.silent, beats.behind(exchanges)
            if dead := self._dead():
                self._found(dead)
            elif silent is not None:
                self._found(f"{self._name(silent)} has not answered for {HUNG_S:.0f} seconds")
            elif exchanges % 2 and now - since > BEHIND_S and behind is not None:
                self._found(f"{self._name(behind)} hangs: rank 0 has waited for it for {BEHIND_S:.0f} seconds")
            if self.is_lost:
                return

    def _name(self, rank: int) -> str:
        child = self._children.get(rank)
        return f"rank {rank}" + (f" (process {child.pid})" if child else "")

    def _found(self, reason: str) -> None:
        if self._ending.is_set() or self.is_lost:
            return
        self._reason = RankLost(reason, _LOST)
        self._is_lost.set()
        self._kill()  # exchanges with them now fail instead of hanging
        self.on_lost(self._reason)

    def _lost(self, reason: str) -> RankLost:
        """Return the error of a failed exchange: the loss of a rank, as soon as it is known."""
        self._is_lost.wait(2 * BEAT_S)
        return self._reason or RankLost(f"the ranks lost each other: {reason}", _LOST)

    def _kill(self) -> None:
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.kill()
        for child in self._children.values():
            child.wait()


class Beats:
    """Last heartbeats of other ranks: text, reads since it changed, and exchanges that the rank had begun. Reads are
    counted, not seconds: all ranks may have been suspended together."""

    def __init__(self, ranks: range) -> None:
        self._last = dict.fromkeys(ranks, ("", 0, 0))

    def read(self, store: dist.Store) -> None:
        for rank, (known, missed, exchanges) in self._last.items():
            key = f"beat/{rank}"
            text = store.get(key).decode() if store.check([key]) else ""
            self._last[rank] = (known, missed + 1, exchanges) if text == known else (text, 0, int(text.split()[1]))

    @property
    def silent(self) -> int | None:
        """A rank without a heartbeat for HUNG_S seconds."""
        return next((rank for rank, (_, missed, _) in self._last.items() if missed * BEAT_S > HUNG_S), None)

    def behind(self, exchanges: int) -> int | None:
        """A rank that has not begun the caller's current exchange."""
        return next((rank for rank, (_, _, own) in self._last.items() if own < exchanges), None)


def join(rank: int, size: int) -> Ranks:
    """Join rank 0 as another rank. This process ends with exit code 5 when rank 0 is gone."""
    if STARTED in os.environ:
        port, timeout = int(os.environ["MASTER_PORT"]), timedelta(seconds=START_S)
        store: dist.Store = dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
    else:
        store = _outer_store()
    device = rank_device(torch.device(store.get("device").decode()), rank)
    make_current(device)
    store.set(f"here/{rank}", "1")
    ranks = _joined(store, rank, size, device)
    own = store.clone()  # type: ignore[attr-defined]
    threading.Thread(target=_watch_first, args=(own, ranks), name="cacheblend-ranks", daemon=True).start()
    return ranks


def _watch_first(store: dist.Store, ranks: Ranks) -> None:
    store.set_timeout(timedelta(seconds=HUNG_S))
    beats = Beats(range(1))
    try:
        while beats.silent is None:
            store.set(f"beat/{ranks.rank}", f"{time.monotonic()} {ranks.exchanges}")
            beats.read(store)
            time.sleep(BEAT_S)
    except Exception:
        time.sleep(BEAT_S)  # rank 0 may have announced its end
    os._exit(DeviceError.exit_code)


def _loopback_store() -> tuple[dist.Store, int]:
    """Return a store that other machines cannot reach, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, timeout = listening.getsockname()[1], timedelta(seconds=START_S)
        store = dist.TCPStore(
            "127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )
    return store, port


def loopback() -> dict[str, str]:
    """Return the variable that keeps gloo on this machine, unless the user set it."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {GLOO_INTERFACE: names[0]} if names and not os.environ.get(GLOO_INTERFACE) else {}


@contextmanager
def on_loopback() -> Iterator[None]:
    """Groups created in this context do not listen to other machines, unless the user chose an interface."""
    own = loopback()
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name)


def _outer_store() -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_S)))
    return dist.PrefixStore("cacheblend", store)


def _joined(store: dist.Store, rank: int, size: int, device: torch.device) -> Ranks:
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timedelta(seconds=START_S)
    )
    return Ranks(rank, size, device)


_group: list[RankGroup] = []  # at most one: torch.distributed has one default group per process


def group_of(size: int, device: torch.device) -> RankGroup:
    """Return the group of this size, started if there is none. Another one is closed, with its models."""
    if _group and ((_group[0].size, _group[0].device.type) != (size, device.type) or _group[0].is_lost):
        _group.pop().close()
    if not _group:
        _group.append(RankGroup(size, device))
    return _group[0]
