"""Disk cache of packed weights: later starts map them instead of packing again.

A file holds the weights of one model in one precision, as packed by one version of torch for one CPU. The total size is
limited; the least recently used file goes first.
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
from cacheblend_store import private_files

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
LEAST_BYTES = 64 << 20  # minimum file size: less is packed as fast
RECENT_S = 24 * 3600.0
DEAD_S = 600.0  # seconds; an older temporary file was left by a killed process
FREE_SHARE = 4  # a file takes at most this fraction of the free disk (1 / FREE_SHARE)


class Build(Protocol):
    """Builds the decoder. hollow: with meta tensors in place of large weights."""

    def __call__(self, *, hollow: bool) -> Decoder: ...


class Writer(threading.Thread):
    """Writes a file in the background. The program waits for it before it exits.

    path: the file. size: its weights, bytes.
    """

    def __init__(self, keep: Callable[[Callable[[], bool]], None], path: Path, size: int) -> None:
        super().__init__(name="cacheblend-packed")
        self.path, self.size = path, size
        self._keep, self._stop_asked, self._done = keep, threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self._keep(self._stop_asked.is_set)
        finally:
            self._done.set()

    def wait(self) -> None:
        """Wait for the end. `join`, when interrupted, considers the thread finished in CPython 3.11 (bpo-45274)."""
        self._done.wait()

    def stop(self) -> None:
        """Cancel writing, and return when the partial file is removed."""
        self._stop_asked.set()
        self._done.wait()


def writers() -> list[Writer]:
    """Return the threads of this process that are still writing."""
    return [thread for thread in threading.enumerate() if isinstance(thread, Writer)]


class PackedCache:
    """Packed weights of one model. fingerprint: of the model, dtypes included. max_bytes: limit of all files.
    least_bytes: minimum size of a file."""

    def __init__(self, fingerprint: str, max_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        self._max_bytes, self._least_bytes = max_bytes, least_bytes
        self.is_used = False  # after `decoder`: the file was used
        self.excess_bytes = 0  # after `decoder`: size of the weights, if there is no room for them
        self.path = user_cache.place(
            user_cache.PACKED_WEIGHTS, FORMAT, __version__, fingerprint, torch.__version__, cpu_name(), *cpu_features()
        )

    def decoder(self, build: Build) -> Decoder:
        """Return the decoder with weights from the file, or packed now and written in the background."""
        with suppress(OSError, PackedMismatch, KeyError, TypeError, AttributeError, ValueError, RuntimeError):
            file = PackedFile(self.path)
            with ThreadPoolExecutor(1) as beside:
                whole = beside.submit(file.is_whole)
                decoder = build(hollow=True)
                hollow = hollow_products(decoder)
                if whole.result():  # check before using anything from the header
                    file.fill(hollow)
                    self.is_used = True
                    with suppress(OSError):
                        os.utime(self.path)
                    return decoder
        decoder = build(hollow=False)
        products = [member for _, member in members_of(decoder) if not isinstance(member, torch.Tensor)]
        size = sum(product.num_bytes for product in products if product.packed)
        if size > self._most():
            self.excess_bytes = size
        elif size >= self._least_bytes:
            Writer(lambda stopped: self._keep(decoder, build, stopped), self.path, size).start()
        return decoder

    def _keep(self, decoder: Decoder, build: Build, stopped: Callable[[], bool]) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # lower priority than the first answer
        with suppress(Exception):  # if writing fails, the next start packs again
            own = dict(members_of(decoder))
            products = dict[str, Product]()
            hollow = hollow_products(build(hollow=True))
            for name in hollow:
                product = own.get(name)
                if isinstance(product, torch.Tensor) or product is None or not product.weight.is_mkldnn:
                    return
                products[name] = product
            if not self._has_room(num_bytes(products)):
                return
            temporary = private_files.temporary_of(self.path)
            try:
                write(temporary, products, stopped)
                PackedFile(temporary).fill(hollow)  # verify it as the next start would use it
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)

    def _most(self) -> int:
        """Return the largest size of a file, 0 if none can be written."""
        try:
            private_files.make_folder(self.path.parent)
            return min(self._max_bytes, shutil.disk_usage(self.path.parent).free // FREE_SHARE)
        except OSError:
            return 0

    def _has_room(self, size: int) -> bool:
        """Return whether a file of this size may be written, after removing the least recently used files. Files used
        within the last day stay: otherwise models used in turn would be written at every start. Temporary files left by
        killed processes are always removed."""
        folder, now = self.path.parent, time.time()
        for path in folder.iterdir():
            if path.suffix and now - path.stat().st_mtime > DEAD_S:
                path.unlink(missing_ok=True)
        if not self._least_bytes <= size <= self._most():
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
