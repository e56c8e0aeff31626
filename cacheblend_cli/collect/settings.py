"""Settings for cutting and collecting documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import convert

from cacheblend_cli.corpus.search import check_context
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import check_kv_dtype


@dataclass(frozen=True)
class CollectSettings:
    """Settings of a document or root."""

    chunk_tokens: int = 512  # maximum tokens of a chunk
    context: str = "document"  # left context of a chunk, see corpus/contexts.py
    window: int = 2048  # maximum tokens of a chunk and its left context
    neighbours: int = 3  # number of similar chunks for context `neighbours`
    kv_dtype: str = "auto"  # see `collection.codec_of`
    overlap: int = 0  # maximum tokens of the preceding text that a chunk repeats

    def __post_init__(self) -> None:
        check_context(self.context)
        if self.chunk_tokens < 1:
            raise UsageError(f"--chunk-tokens {self.chunk_tokens} is not 1 or more", "512 is the default")
        if not 0 <= self.overlap <= self.chunk_tokens // 2:
            raise UsageError(
                f"--overlap {self.overlap} is not between 0 and half of --chunk-tokens {self.chunk_tokens}",
                "a tenth of a chunk is usually enough",
            )
        if self.window < 1 or self.neighbours < 1:
            name, value = ("window", self.window) if self.window < 1 else ("neighbours", self.neighbours)
            raise UsageError(f"--{name} {value} is not 1 or more", "see: cacheblend precompute --help")
        check_kv_dtype(self.kv_dtype)

    def of_record(self) -> dict[str, int]:
        """Return the settings that determine a document's chunks, apart from text, context and codec."""
        found = {"chunk_tokens": self.chunk_tokens}
        if self.overlap:
            found["overlap"] = self.overlap
        if self.context != "sink":
            found["window"] = self.window
        if self.context == "neighbours":
            found["neighbours"] = self.neighbours
        return found

    @classmethod
    def of_document(cls, recorded: Mapping[str, Any], context: str, kv_dtype: str) -> CollectSettings | None:
        """Return the settings in a document's record, or None if they are not valid in this version."""
        try:
            return convert({**recorded, "context": context, "kv_dtype": kv_dtype}, cls)
        except (ValueError, UsageError):
            return None
