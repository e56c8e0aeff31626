"""Compact storage for the sizes of a plan's chunks: a corpus has millions of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
from cacheblend_store.format.keys import KEY_BYTES, unpack_ids
from numpy.typing import NDArray

from cacheblend_cli.collect.spool import ByteRange, Spool

_BLOCK_DOCUMENTS = 1 << 10
_FEW_BYTES = 256  # keep data up to this size in memory: a place in the spool takes as much
_SIZE = Struct(f"<{KEY_BYTES}sIIIb")
_HAS_KV = {None: -1, False: 0, True: 1}


class ChunkSize(NamedTuple):
    """A planned chunk without its text."""

    key: bytes
    num_tokens: int
    left_len: int  # tokens of the left context
    record_bytes: int  # size of the record with KV
    has_kv: bool | None = None  # whether the stored chunk has KV; None if it is not stored or its record is damaged


class ChunkSizes:
    """Sizes of a document's chunks, in order.

    They are in the spool, or in memory if they are few or the disk is full.
    """

    __slots__ = ("_data", "_spool")

    def __init__(self, sizes: Iterable[ChunkSize], spool: Spool) -> None:
        data, self._spool = b"".join(_SIZE.pack(*size[:4], _HAS_KV[size.has_kv]) for size in sizes), spool
        place = spool.append_bytes(data) if len(data) > _FEW_BYTES else None
        self._data: bytes | ByteRange = data if place is None else place

    def __iter__(self) -> Iterator[ChunkSize]:
        data = self._spool.read_bytes(self._data) if isinstance(self._data, ByteRange) else self._data
        for key, num_tokens, left_len, num_bytes, has_kv in _SIZE.iter_unpack(data):
            yield ChunkSize(key, num_tokens, left_len, num_bytes, None if has_kv < 0 else has_kv > 0)


class Settled:
    """Documents that need no work: by their summaries, the current version is stored and all chunks have KV."""

    def __init__(self) -> None:
        self.documents = self.chunks = self.tokens = 0
        self._keys, self._tokens = list[bytes](), list[bytes]()

    def add(self, keys: bytes, tokens: bytes) -> None:
        """Add a document. keys, tokens: see DocumentSummary."""
        self.documents += 1
        self.chunks += len(keys) // KEY_BYTES
        self.tokens += sum(unpack_ids(tokens))
        self._keys.append(keys)
        self._tokens.append(tokens)

    def blocks(self) -> Iterator[tuple[bytes, NDArray[np.uint32]]]:
        """Yield (joined chunk keys, token counts [num_chunks]) for a batch of documents at a time."""
        for at in range(0, len(self._keys), _BLOCK_DOCUMENTS):
            of = slice(at, at + _BLOCK_DOCUMENTS)
            yield b"".join(self._keys[of]), np.frombuffer(b"".join(self._tokens[of]), "<u4")
