"""A tier as a store uses it: what fails is a miss, and what was stored is put in the background."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from cacheblend_store.errors import BadBlob, StoreError, TierNotFound
from cacheblend_store.format.records import ChunkManifest, Memo
from cacheblend_store.tier.layout import ObjectLayout
from cacheblend_store.tier.objects import Tier

READERS, WRITERS = 32, 4
FAILURES, REST_S = 3, 30.0
"""After FAILURES failed requests in a row, the tier is not used for REST_S seconds."""
_NEW = 0.2  # weight of the newest measurement in a running average
T = TypeVar("T")
LoadChunk = Callable[[bytes], tuple[ChunkManifest, Sequence[bytes]] | None]
"""Reads a chunk with KV from the store; None if it currently has no KV."""
LoadCollection = Callable[[str], Memo | None]
"""Reads a collection's memo from the store."""
logger = logging.getLogger("cacheblend")


@dataclass
class TierCounts:
    """Counters since the tier was opened."""

    hits: int = 0  # look-ups of chunks that the tier has
    misses: int = 0  # look-ups of chunks that it does not have
    late: int = 0  # look-ups that were not answered in time
    failed: int = 0  # requests
    refused: int = 0  # objects that were damaged or belong to another writer
    rests: int = 0  # times that the circuit breaker opened
    read_bytes: int = 0
    read_s: float = 0.0  # time with concurrent reads in flight
    puts: int = 0  # chunks written
    put_bytes: int = 0
    unput: int = 0  # chunks that could not be written


class SharedTier:
    """Reads and writes of one process. Thread-safe. Errors of the tier are not raised. deadline_s: default time to look
    up chunks. say: called once for each kind of failure. latency_s, bytes_per_s: measured averages, 0 if unknown."""

    def __init__(self, tier: Tier, deadline_s: float = 0.05, say: Callable[[str], None] = logger.warning) -> None:
        self.tier, self.deadline_s, self.say = tier, deadline_s, say
        self.latency_s = self.bytes_per_s = 0.0
        self._counts = TierCounts()
        self._readers, self._writers = Threads(READERS, "tier-read"), Threads(WRITERS, "tier-write")
        self._lock = threading.Lock()
        self._collections = set[str]()  # collections that were uploaded
        self._puts = set[Future[None]]()  # uploads that have not ended
        self._known, self._refused = set[bytes](), set[bytes]()  # keys in the tier; keys of objects to replace
        self._in_row, self._rests_until = 0, 0.0
        self._said = set[str]()
        self._checked: Future[None] | None = None

    @property
    def counts(self) -> TierCounts:
        with self._lock:
            return replace(self._counts)

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def check_later(self) -> None:
        """Check the tier in the background. It is not used until then, or if the check fails permanently."""

        def check() -> None:
            try:
                self._request(self.tier.check)
            except StoreError:
                self._rests_until = math.inf
                raise

        self._checked = self._readers.submit(check)

    # reading

    def find(self, chunks: Iterable[ChunkManifest], seconds: float | None = None) -> dict[bytes, ObjectLayout]:
        """Return the layouts of the chunks in the tier. Look-ups run concurrently; late answers are dropped. chunks:
        manifests with the expected shape; sizes and digests are ignored. seconds: timeout, by default deadline_s."""
        seconds = self.deadline_s if seconds is None else seconds
        wanted = {chunk.key: chunk for chunk in chunks if chunk.key not in self._refused}
        if wanted and self._checked is not None:
            wait([self._checked], timeout=seconds)
        if not wanted or self.resting or (self._checked is not None and not self._checked.done()):
            return {}
        asked = {key: self._readers.submit(partial(self._size, chunk)) for key, chunk in wanted.items()}
        wait(asked.values(), timeout=seconds)
        found, late = dict[bytes, ObjectLayout](), 0
        for key, answer in asked.items():
            if answer.cancel() or not answer.done():
                late += 1
                continue
            try:
                size = answer.result()
                if size is not None:
                    found[key] = self.tier.layout(wanted[key], size)
            except BadBlob as error:
                self.refuse(key, error)
            except StoreError:
                pass  # `_request` counted it
        with self._lock:
            self._counts.hits += len(found)
            self._counts.misses += len(wanted) - len(found)
            self._counts.late += late
            self._known |= found.keys()
        if late == len(wanted):
            self._failed("late", f"it did not answer in {seconds * 1e3:.0f} ms (--tier-deadline)")
        return found

    def _name(self, chunk: ChunkManifest) -> str:
        return self.tier.name(chunk.collection, chunk.key)

    def _size(self, chunk: ChunkManifest) -> int | None:
        start = time.perf_counter()
        size = self._request(lambda: self.tier.size(self._name(chunk)))
        self.latency_s = _average(self.latency_s, time.perf_counter() - start)
        return size

    def read(self, chunk: ChunkManifest, start: int, end: int) -> Future[memoryview]:
        """Read bytes of a chunk's object, in a thread. The result raises StoreError."""

        def read() -> memoryview:
            begun = time.perf_counter()
            data = self._request(lambda: self.tier.read(self._name(chunk), start, end))
            with self._lock:
                self._counts.read_bytes += end - start
                self._counts.read_s += time.perf_counter() - begun
            return data

        return self._readers.submit(read)

    def measured(self, num_bytes: int, seconds: float) -> None:
        """Record the time of concurrent reads of num_bytes bytes."""
        if num_bytes and seconds > 0:
            self.bytes_per_s = _average(self.bytes_per_s, num_bytes / seconds)

    def refuse(self, key: bytes, error: StoreError) -> None:
        """Ignore this object, because it is damaged or belongs to another chunk. The next put replaces it."""
        with self._lock:
            self._counts.refused += 1
            self._refused.add(key)
            self._known.discard(key)
        self._say("refused", f"for chunk {key.hex()[:12]}: {error.message}")

    def gave_up(self) -> None:
        """Record that a request timed out while an answer waited for it."""
        self._failed("slow", "its KV did not come in time")

    # writing

    def offer(self, keys: Iterable[bytes], load: LoadChunk, load_collection: LoadCollection) -> None:
        """Upload chunks of the store in the background, unless the tier has them, and their collections' memos."""
        with self._lock:
            new = [key for key in keys if key not in self._known]
            self._known.update(new)
        for key in new:
            put = self._writers.submit(partial(self._put, key, load, load_collection))
            self._puts.add(put)
            put.add_done_callback(self._puts.discard)

    def _put(self, key: bytes, load: LoadChunk, load_collection: LoadCollection) -> None:
        size, put = 0, False
        try:
            chunk = None if self.resting else load(key)
            if chunk is not None:
                there = None if key in self._refused else self._request(lambda: self.tier.size(self._name(chunk[0])))
                size = self._request(lambda: self.tier.put_chunk(*chunk)) if there is None else 0
                put = True
                self._put_collection(chunk[0].collection, load_collection)
        except StoreError:
            pass  # reported by `_request`, or by verify if the store is damaged
        finally:
            with self._lock:
                self._counts.puts += size > 0
                self._counts.put_bytes += size
                self._counts.unput += not put
                if put:
                    self._refused.discard(key)
                else:
                    self._known.discard(key)

    def _put_collection(self, collection: str, load: LoadCollection) -> None:
        """Upload a collection's memo once."""
        with self._lock:
            new = collection not in self._collections
            self._collections.add(collection)
        memo = load(collection) if new else None
        if memo is not None:
            self._request(lambda: self.tier.put_collection(memo))

    @property
    def unput(self) -> int:
        """Number of chunks waiting to be uploaded."""
        return len(self._puts)

    def flush(self, seconds: float) -> int:
        """Wait up to `seconds` for pending uploads. Return how many are left."""
        return len(wait(list(self._puts), timeout=seconds).not_done)

    def close(self, seconds: float = 0.0) -> int:
        """Flush, and stop uploading. Return how many chunks were not uploaded."""
        left = self.flush(seconds)
        for put in list(self._puts):
            put.cancel()
        return left

    # failures

    def _request(self, send: Callable[[], T]) -> T:
        """Send a request and count failures. A missing or damaged object is not a failure of the tier."""
        try:
            result = send()
        except (BadBlob, TierNotFound):
            self._in_row = 0
            raise
        except StoreError as error:
            self._failed(type(error).__name__, error.message)
            raise
        self._in_row = 0
        return result

    def _failed(self, kind: str, what: str) -> None:
        with self._lock:
            self._counts.failed += 1
            self._in_row += 1
            if self._in_row >= FAILURES and not self.resting:
                self._rests_until = time.monotonic() + REST_S
                self._counts.rests += 1
        self._say(kind, what)

    def _say(self, kind: str, what: str) -> None:
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        self.say(f"the tier at {self.tier.url} is not used: {what}")


def _average(old: float, new: float) -> float:
    return new if not old else (1 - _NEW) * old + _NEW * new


class Threads:
    """Up to `count` daemon threads, one started with each of the first jobs. Process exit does not wait for them."""

    def __init__(self, count: int, name: str) -> None:
        self._most, self._name, self._started = count, name, 0
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in one of the threads."""
        future: Future[T] = Future()
        self._work.put((work, future))
        with self._lock:
            if self._started < self._most:
                self._started += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            work, future = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del work, future  # release references while waiting for the next job
