"""Packed weights on disk: what a start would pack again is mapped instead.

A file holds the weights of one model in one precision, as one version of torch packs them for one CPU. The files together take
no more than a limit; the one that was used longest ago goes first.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from cacheblend_cli import user_cache
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.machine_speeds import cpu_features, cpu_name
from cacheblend_cli.model.packed_file import (
    PackedFile,
    PackedMismatch,
    Product,
    hollow_products,
    members_of,
    num_bytes,
    write,
)
from cacheblend_cli.version import __version__

FORMAT = 1
LEAST_BYTES = 64 << 20  # of a file: less is packed as fast
RECENT_S = 24 * 3600.0
DEAD_S = 600.0  # age from which a temporary file belongs to no process that still writes
FREE_SHARE = 4  # a file takes this part of the free disk at most


class Build(Protocol):
    """Makes the decoder; `hollow`: with meta tensors in the place of large weights."""

    def __call__(self, *, hollow: bool) -> Decoder: ...


class Writer(threading.Thread):
    """Writes a file while the program goes on, which waits for it before it ends."""

    def __init__(self, keep: Callable[[Callable[[], bool]], None]) -> None:
        super().__init__(name="cacheblend-packed")
        self._keep, self._stop_asked, self._done = keep, threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self._keep(self._stop_asked.is_set)
        finally:
            self._done.set()

    def wait(self) -> None:
        """Wait for the end. Not `join`: interrupted, it takes the thread for ended in CPython 3.11 (bpo-45274)."""
        self._done.wait()

    def stop(self) -> None:
        """Give the file up, and return when what was written of it is removed."""
        self._stop_asked.set()
        self._done.wait()


def writers() -> list[Writer]:
    """Threads of this process that still write."""
    return [thread for thread in threading.enumerate() if isinstance(thread, Writer)]


class PackedCache:
    """fingerprint: of the model, with its dtypes. max_bytes: of all files. least_bytes: of one that is worth keeping."""

    def __init__(self, fingerprint: str, max_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        self._max_bytes, self._least_bytes = max_bytes, least_bytes
        self.is_used = False  # after `decoder`: whether the file was there
        self.path = user_cache.place(
            user_cache.PACKED_WEIGHTS, FORMAT, __version__, fingerprint, torch.__version__, cpu_name(), *cpu_features()
        )

    def decoder(self, build: Build) -> Decoder:
        """Return the decoder with weights of the file, or with weights packed now, which are written beside what follows."""
        with suppress(OSError, PackedMismatch, KeyError, TypeError, AttributeError, ValueError, RuntimeError):
            file = PackedFile(self.path)
            with ThreadPoolExecutor(1) as beside:
                whole = beside.submit(file.is_whole)
                decoder = build(hollow=True)
                hollow = hollow_products(decoder)
                if whole.result():  # before anything of the header is used
                    file.fill(hollow)
                    self.is_used = True
                    with suppress(OSError):
                        os.utime(self.path)
                    return decoder
        decoder = build(hollow=False)
        products = [member for _, member in members_of(decoder) if not isinstance(member, torch.Tensor)]
        if sum(product.num_bytes for product in products if product.packed) >= self._least_bytes:
            Writer(lambda stopped: self._keep(decoder, build, stopped)).start()
        return decoder

    def _keep(self, decoder: Decoder, build: Build, stopped: Callable[[], bool]) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # behind the first answer
        with suppress(Exception):  # what cannot be kept is packed at the next start
            own = dict(members_of(decoder))
            products = dict[str, Product]()
            hollow = hollow_products(build(hollow=True))
            for name in hollow:
                product = own.get(name)
                if isinstance(product, torch.Tensor) or product is None or not product.weight.is_mkldnn:
                    return
                products[name] = product
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._has_room(num_bytes(products)):
                return
            temporary = user_cache.temporary_of(self.path)
            try:
                write(temporary, products, stopped)
                PackedFile(temporary).fill(hollow)  # as the next start does
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)

    def _has_room(self, size: int) -> bool:
        """Return whether a file of this size may be written. Removes the files that were used longest ago, but none of the last day:
        models used in turn would be written at every start. Removes temporary files that killed processes left, in any case."""
        folder, now = self.path.parent, time.time()
        for path in folder.iterdir():
            if path.suffix and now - path.stat().st_mtime > DEAD_S:
                path.unlink(missing_ok=True)
        if not self._least_bytes <= size <= min(self._max_bytes, shutil.disk_usage(folder).free // FREE_SHARE):
            return False
        newest_first = sorted(
            ((s.st_mtime, s.st_size, p) for p in folder.iterdir() for s in [p.stat()] if not p.suffix), reverse=True
        )
        kept, removed = size, list[Path]()
        for used, own, path in newest_first:
            if path != self.path and kept + own <= self._max_bytes:
                kept += own
            elif path != self.path and now - used < RECENT_S:
                return False
            else:
                removed.append(path)
        for path in removed:
            path.unlink(missing_ok=True)
        return True
