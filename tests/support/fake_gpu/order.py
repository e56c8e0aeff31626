"""Happens-before order: vector clocks of streams and threads, and the accesses of one allocation.

An access is stamped with its stream and the stream's time. A stream knows what it queued, what the queueing thread
knows, and what the events it waits for know. Two accesses of the same bytes, one of them a write, must be ordered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Clock = dict[int, int]
"""Stream id -> time up to which its work is known to be finished."""

MOST_ACCESSES = 2000


def merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def knows(clock: Clock, stream: int, time: int) -> bool:
    return clock.get(stream, 0) >= time


@dataclass(frozen=True)
class Region:
    """Bytes start:end of an allocation. With rows, only these rows of row_bytes each, counted from start."""

    start: int
    end: int
    row_bytes: int = 0
    rows: frozenset[int] | None = None

    @classmethod
    def of(cls, elem: Any, rows: Iterable[int] | None = None) -> Region:
        """Region of a tensor on the CPU. rows: of its first dimension, which is packed; None for all."""
        if not elem.numel():
            return cls(0, 0)
        size = elem.element_size()
        start = elem.storage_offset() * size
        end = start + (sum((n - 1) * step for n, step in zip(elem.shape, elem.stride(), strict=True)) + 1) * size
        return cls(start, end) if rows is None else cls(start, end, elem.stride(0) * size, frozenset(rows))

    def overlaps(self, other: Region) -> bool:
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.rows is None or other.rows is None:
            return self._reaches(other.start, other.end) and other._reaches(self.start, self.end)
        same = self.start == other.start and self.row_bytes == other.row_bytes
        return not (same and self.rows.isdisjoint(other.rows))

    def covers(self, other: Region) -> bool:
        whole = self.rows is None and self.start <= other.start and other.end <= self.end
        return whole or self == other

    def _reaches(self, start: int, end: int) -> bool:
        """Return whether any of its rows overlaps bytes start:end."""
        if self.rows is None:
            return self.start < end and start < self.end
        firsts = (self.start + row * self.row_bytes for row in self.rows)
        return any(first < end and start < first + self.row_bytes for first in firsts)


@dataclass
class Accesses:
    """Accesses of an allocation that later ones may have to be ordered after: (region, stream id) -> time."""

    reads: dict[tuple[Region, int], int] = field(default_factory=dict)
    writes: dict[tuple[Region, int], int] = field(default_factory=dict)

    def conflicts(self, region: Region, write: bool, clock: Clock) -> list[tuple[str, int]]:
        """Return ("write" or "read", stream id) of each earlier access that `clock` does not know."""
        kinds = (("write", self.writes), ("read", self.reads)) if write else (("write", self.writes),)
        return [
            (kind, stream)
            for kind, accesses in kinds
            for (other, stream), time in accesses.items()
            if not knows(clock, stream, time) and region.overlaps(other)
        ]

    def add(self, region: Region, write: bool, stream: int, time: int) -> None:
        """Record an access. A write replaces the accesses that it covers: later ones are compared with it instead."""
        if write:
            for accesses in (self.reads, self.writes):
                for key in [key for key in accesses if region.covers(key[0])]:
                    del accesses[key]
        kept = self.writes if write else self.reads
        kept[region, stream] = time
        if len(kept) > MOST_ACCESSES:
            for key in list(kept)[: MOST_ACCESSES // 2]:
                del kept[key]

    def unknown_streams(self, clock: Clock) -> set[int]:
        """Return the streams with an access that `clock` does not know."""
        every = [*self.reads.items(), *self.writes.items()]
        return {stream for (_, stream), time in every if not knows(clock, stream, time)}
