"""Temporary file for the planned chunks of a run, so that a corpus need not fit in memory and is cut only once."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import IO, NamedTuple

import msgspec
from cacheblend_store.conversion import decoder

from cacheblend_cli.corpus.chunker import Chunk

MAX_BYTES = 256 << 20
_BATCH = 64  # chunks that are encoded together
_SIZE = 8  # bytes of a batch's length field
_decode = decoder(list[Chunk]).decode
_encode = msgspec.msgpack.Encoder().encode


class ByteRange(NamedTuple):
    """Bytes start:start+size of the file."""

    start: int
    size: int


class Spool:
    """Holds chunks of documents, at most MAX_BYTES in total. The file is deleted with the spool."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    def append(self, chunks: Iterable[Chunk]) -> ByteRange | None:
        """Write a document's chunks, all of which are read. Return None if there is no room.

        If their iterator fails, the next document overwrites the partial data.
        """
        unread = iter(chunks)
        end: int | None = self._end
        while batch := list(islice(unread, _BATCH)):
            if end is not None:
                end = self._write(_encode(batch), end)
        if end is None:
            return None
        place = ByteRange(self._end, end - self._end)
        self._end = end
        return place

    def _write(self, data: bytes, start: int) -> int | None:
        """Write a batch with its size. Return where it ends, None if there is no room."""
        data = len(data).to_bytes(_SIZE, "big") + data
        if start + len(data) > MAX_BYTES:
            return None
        with suppress(OSError):  # disk full: the caller copes
            if self._file is None:
                # unbuffered: a later read must not retry a write that failed
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                weakref.finalize(self, _close, self._file)
            self._file.seek(start)
            if self._file.write(data) == len(data):
                return start + len(data)
        return None

    def read(self, place: ByteRange) -> list[Chunk]:
        assert self._file is not None, "a place exists only in an open file"
        self._file.seek(place.start)
        data = memoryview(self._file.read(place.size))
        found = list[Chunk]()
        while data:
            stop = _SIZE + int.from_bytes(data[:_SIZE], "big")
            found += _decode(data[_SIZE:stop])
            data = data[stop:]
        return found


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):
        file.close()
