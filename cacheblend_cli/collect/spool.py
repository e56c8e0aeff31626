"""Temporary file of what a run plans, until it is stored: a corpus need not fit in memory, and is not cut twice."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

import msgspec

from cacheblend_cli.corpus.chunker import Chunk

MAX_BYTES = 256 << 20
_decode = msgspec.msgpack.Decoder(list[Chunk]).decode
_encode = msgspec.msgpack.Encoder().encode


class Place(NamedTuple):
    """Bytes start:start+size of the file."""

    start: int
    size: int


class Spool:
    """Chunks of documents, at most MAX_BYTES in all, and other bytes. The file goes when the spool does."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = self._num_bytes = 0

    def append(self, chunks: Sequence[Chunk]) -> Place | None:
        """Keep a document's chunks. Returns None if there is no room for them."""
        data = _encode(chunks)
        if self._num_bytes + len(data) > MAX_BYTES:
            return None
        place = self.append_bytes(data)
        self._num_bytes += 0 if place is None else len(data)
        return place

    def append_bytes(self, data: bytes) -> Place | None:
        """Keep bytes. Returns None if the disk has no room for them."""
        with suppress(OSError):  # a full disk: the caller does without
            if self._file is None:
                # unbuffered: bytes that had no room must not be tried again by a read
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                weakref.finalize(self, _close, self._file)
            self._file.seek(self._end)
            if self._file.write(data) == len(data):
                place = Place(self._end, len(data))
                self._end += len(data)
                return place
        return None

    def read(self, place: Place) -> list[Chunk]:
        return _decode(self.read_bytes(place))

    def read_bytes(self, place: Place) -> bytes:
        assert self._file is not None, "a place is in the file"
        self._file.seek(place.start)
        return self._file.read(place.size)


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):
        file.close()
