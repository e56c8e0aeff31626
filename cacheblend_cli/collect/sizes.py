"""Sizes of a plan's chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cacheblend_store.format.keys import KEY_BYTES, unpack_ids

from cacheblend_cli.collect.summaries import split_keys


class ChunkSize(NamedTuple):
    """A planned chunk without its text."""

    key: bytes
    num_tokens: int
    left_len: int  # tokens of the left context
    record_bytes: int  # size of the record with KV
    has_kv: bool | None = None  # whether the stored chunk has KV; None if it is not stored or its record is damaged


class Settled:
    """Documents that need no work: by their summaries, the current version is stored and all chunks have KV."""

    def __init__(self) -> None:
        self.num_documents = self.num_chunks = self.num_tokens = 0
        self._summaries = list[tuple[bytes, bytes]]()

    def add(self, keys: bytes, tokens: bytes) -> None:
        """Add a document. keys, tokens: see DocumentSummary."""
        self.num_documents += 1
        self.num_chunks += len(keys) // KEY_BYTES
        self.num_tokens += sum(unpack_ids(tokens))
        self._summaries.append((keys, tokens))

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the key and the number of tokens of each chunk."""
        for keys, tokens in self._summaries:
            yield from zip(split_keys(keys), unpack_ids(tokens), strict=True)
