"""Temporary file for the planned chunks of a run, so that a corpus need not fit in memory and is cut only once."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

import msgspec
from cacheblend_store.conversion import decoder

from cacheblend_cli.corpus.chunker import Chunk

MAX_BYTES = 256 << 20
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

    def append(self, chunks: Sequence[Chunk]) -> ByteRange | None:
        """Write a document's chunks. Return None if there is no room. The next document overwrites partial data."""
        data = _encode(chunks)
        if self._end + len(data) > MAX_BYTES:
            return None
        with suppress(OSError):  # disk full: the caller copes
            if self._file is None:
                # unbuffered: a later read must not retry a write that failed
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                weakref.finalize(self, _close, self._file)
            self._file.seek(self._end)
            if self._file.write(data) == len(data):
                self._end += len(data)
                return ByteRange(self._end - len(data), len(data))
        return None

    def read(self, place: ByteRange) -> list[Chunk]:
        assert self._file is not None, "a place exists only in an open file"
        self._file.seek(place.start)
        return _decode(self._file.read(place.size))


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):
        file.close()
