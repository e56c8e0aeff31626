"""Cut long documents in a separate process with memory and CPU limits, and short ones in the caller's.

Cutting is Python code: in a thread, it makes each operation of a server's engine wait for Python's lock, and answers
come several times slower. `DocumentCutter` gives `python -m` this module the tokenizer once, then a document at a time,
and receives its chunks in batches.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import msgspec
from cacheblend_documents.converted import Converted, NotConverted
from cacheblend_documents.limited_process import MIB, LimitedProcess, ProcessEnded, limits, receive_greeting, serve
from cacheblend_store.conversion import decoder

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.cutting import CutSettings, cut_document
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.errors import TextRefused
from cacheblend_cli.model.text_encoder import TextEncoder
from cacheblend_cli.model.tokenizer import Tokenizer

SHORT = 1 << 15
"""Characters up to which a document is cut in the caller's process: linear code over a bounded text takes bounded time
(.1 s), less than the process needs to start."""
_BATCH = 1 << 17  # characters of chunks that are sent together
_KEPT = 2  # idle processes to keep


class CutLimits(msgspec.Struct, frozen=True):
    """Limits for cutting one document."""

    seconds: float = 60  # CPU time
    seconds_per_mib: float = 30  # additional CPU time per MiB of the text
    memory: int = 1 << 30  # address space, bytes
    memory_per_byte: int = 16  # additional address space per byte of the text

    def seconds_for(self, size: int) -> float:
        return self.seconds + self.seconds_per_mib * size / MIB


class _Job(msgspec.Struct):
    source: str
    text: bytes  # UTF-8; lone surrogates pass
    layout: Converted  # of the text, which is apart
    cut: CutSettings
    limits: CutLimits


class _Batch(msgspec.Struct):
    """Chunks of a document in order, or why there are no more."""

    chunks: list[Chunk] = []
    refused: tuple[str, str | None] | None = None  # arguments of a TextRefused
    reason: str = ""  # of a NotConverted


_decode = decoder(_Batch).decode


class DocumentCutter:
    """Cuts documents for one tokenizer. Any number of threads may use it; each long document has its own process."""

    def __init__(self, encoder: TextEncoder, limits: CutLimits | None = None) -> None:
        self._encoder, self._limits = encoder, limits or CutLimits()
        self._idle: deque[LimitedProcess] = deque()

    def cut(self, document: Document, cut: CutSettings, cancellation: Cancellation | None = None) -> Iterator[Chunk]:
        """Yield the chunks of `cut_document`. Raises TextRefused, Cancelled, and NotConverted at a limit."""
        if len(document.text) <= SHORT:
            if cancellation is not None:
                cancellation.check()
            yield from cut_document(document, self._encoder.encode, cut)
            return
        process = self._idle.pop() if self._idle else LimitedProcess(__name__, self._encoder.to_bytes)
        try:
            yield from self._cut_in(process, document, cut, cancellation)
        finally:
            if len(self._idle) < _KEPT:
                self._idle.append(process)
            else:
                process.close()

    def _cut_in(
        self, process: LimitedProcess, document: Document, cut: CutSettings, cancellation: Cancellation | None
    ) -> Iterator[Chunk]:
        text = document.text.encode("utf-8", "surrogatepass")
        size, job = len(text), _Job(document.source, text, replace(document.converted, text=""), cut, self._limits)
        message = msgspec.msgpack.encode(job)
        del text, job
        shared = dict[int, int]()
        try:
            for answer in process.stream(message, cancellation):
                batch = _decode(answer)
                for chunk in batch.chunks:
                    ids = chunk.token_ids
                    yield replace(chunk, token_ids=tuple(map(shared.setdefault, ids, ids)))
                if batch.refused is not None:
                    raise TextRefused(*batch.refused)
                if batch.reason:
                    raise NotConverted(batch.reason, "too large to cut")
        except ProcessEnded as ended:
            if ended.is_too_slow:
                seconds = self._limits.seconds_for(size)
                raise NotConverted(f"takes more than {seconds:,.0f} s to cut", "too slow to cut") from None
            raise NotConverted(f"cutting it crashed ({ended})", "too large to cut") from None


_CUTTERS: WeakKeyDictionary[Tokenizer, DocumentCutter] = WeakKeyDictionary()


def cutter_of(tokenizer: Tokenizer) -> DocumentCutter:
    """Return the tokenizer's cutter, whose processes end with the tokenizer."""
    return _CUTTERS.setdefault(tokenizer, DocumentCutter(tokenizer.text_encoder))


def _answers(encoder: TextEncoder, job: _Job) -> Iterator[bytes]:
    """Cut a document within the limits. Yields batches; the last one may have no chunks."""
    size, text = len(job.text), job.text.decode("utf-8", "surrogatepass")
    memory = job.limits.memory + job.limits.memory_per_byte * size
    document, batch, characters = Document(job.source, replace(job.layout, text=text)), _Batch([]), 0
    try:
        with limits(job.limits.seconds_for(size), memory):
            for chunk in cut_document(document, encoder.encode, job.cut):
                batch.chunks.append(chunk)
                characters += len(chunk.text)
                if characters >= _BATCH:
                    yield msgspec.msgpack.encode(batch)
                    batch, characters = _Batch([]), 0
    except TextRefused as error:
        batch.refused = error.message, error.hint
    except MemoryError:
        batch = _Batch([], reason=f"needs more than {memory // MIB:,} MiB of memory to cut")
    yield msgspec.msgpack.encode(batch)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each thread would reserve address space
    encoder = TextEncoder.of_bytes(receive_greeting())
    serve(lambda message: _answers(encoder, msgspec.msgpack.decode(message, type=_Job)))
