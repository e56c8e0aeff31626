"""How documents are cut and collected."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_store import DocumentRecord
from msgspec import convert

from cacheblend_cli.corpus.search import check_context
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import check_kv_dtype


@dataclass(frozen=True)
class CollectSettings:
    """context: what a chunk is collected behind, see corpus/contexts.py. window: tokens of a chunk and its left context
    at most. neighbours: how many similar chunks `neighbours` takes. kv_dtype: a codec, or auto for what is computed. overlap: tokens at most that
    a chunk repeats of the text before it."""

    chunk_tokens: int = 512
    context: str = "document"
    window: int = 2048
    neighbours: int = 3
    kv_dtype: str = "auto"
    overlap: int = 0

    def __post_init__(self) -> None:
        check_context(self.context)
        if self.chunk_tokens < 1:
            raise UsageError(f"--chunk-tokens {self.chunk_tokens} is not 1 or more", "512 is the default")
        if not 0 <= self.overlap <= self.chunk_tokens // 2:
            raise UsageError(
                f"--overlap {self.overlap} is not between 0 and half of --chunk-tokens {self.chunk_tokens}",
                "a tenth of a chunk is much already",
            )
        if self.window < 1 or self.neighbours < 1:
            name, value = ("window", self.window) if self.window < 1 else ("neighbours", self.neighbours)
            raise UsageError(f"--{name} {value} is not 1 or more", "see: cacheblend precompute --help")
        check_kv_dtype(self.kv_dtype)

    def of_record(self) -> dict[str, int]:
        """What of this the chunks of a document depend on beside its text, its context and its codec."""
        found = {"chunk_tokens": self.chunk_tokens}
        if self.overlap:
            found["overlap"] = self.overlap
        if self.context != "sink":
            found["window"] = self.window
        if self.context == "neighbours":
            found["neighbours"] = self.neighbours
        return found

    @classmethod
    def of_document(cls, record: DocumentRecord, kv_dtype: str) -> CollectSettings | None:
        """How the document of that record was cut and collected; None when it makes no sense here: a later version may know
        more contexts."""
        try:
            return convert({**record.settings, "context": record.context, "kv_dtype": kv_dtype}, cls)
        except (ValueError, UsageError):
            return None
