"""Documents given as text: cut like files, identified by content, and stored under their own names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cacheblend_documents.converted import Converted, NotConverted, shortened
from cacheblend_store import ChunkStore, StoreError
from cacheblend_store.writer import StoreWriter

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.collect.document_records import document_record, is_news
from cacheblend_cli.collect.plan import plan_documents
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.citations import TITLE
from cacheblend_cli.corpus.cut_process import cutter_of
from cacheblend_cli.corpus.cutting import CutSettings
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.corpus.places import PUT, SENT
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.types import TextDocument

logger = logging.getLogger("cacheblend")


@dataclass(frozen=True)
class AddedDocument:
    """A document in the store: its id, and the ids of its chunks in order."""

    id: str
    chunks: tuple[str, ...]


def document_of(name: str, text: str, title: str | None) -> Document:
    """Return the same document that `read_documents` would read from a file: line ends are "\\n", and the text ends
    with one.

    title: becomes the heading of the text, unless the text starts with it. Raises UsageError for a blank text.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UsageError("the text of a document is empty", "leave the document out")
    title = shortened((title or "").strip())
    if title and not text.lstrip("# ").startswith(title):
        text = f"# {title}\n\n{text}"
    return Document(name, Converted(text if text.endswith("\n") else text + "\n"))


def sent_document(given: TextDocument, tenant: str) -> Document:
    """Return a document that was sent with a question. Its name is a digest of its content."""
    document = document_of("", given.text, given.title)
    return Document(f"{SENT}{tenant}/{document.digest}", document.converted)


def put_name(tenant: str, document_id: str) -> str:
    """Return the store name of an uploaded document."""
    return f"{PUT}{tenant}/{document_id}"


def plan_texts(
    collection: Collection,
    documents: Sequence[Document],
    settings: CollectSettings,
    cancellation: Cancellation | None = None,
) -> list[list[PlannedChunk]]:
    """Return the chunks of each document, with their keys. A chunk takes at most half of the model's context.

    Raises UsageError for a document that cannot be cut within the limits, TextRefused, and Cancelled.
    """
    room = max(1, (collection.model.spec.max_context - len(collection.prefix_ids)) // 2)
    cut, cutter = CutSettings(min(settings.chunk_tokens, room)), cutter_of(collection.model.tokenizer)
    try:
        cuts = [(document.source, list(cutter.cut(document, cut, cancellation))) for document in documents]
    except NotConverted as no:
        raise UsageError(f"the document {no.reason}", "store it in parts") from no
    return plan_documents(collection, cuts, settings)


class Putting:
    """Stores one document: plans it, collects missing KV one launch at a time, then commits.

    The document is listed and searched only once it is complete. It then replaces the old document of that name.
    """

    def __init__(
        self,
        collection: Collection,
        store: ChunkStore,
        document: Document,
        settings: CollectSettings,
        title: str = "",
        cancellation: Cancellation | None = None,
    ) -> None:
        """Cut the document. Any thread may call this. Raises UsageError, and Cancelled.

        title: shown in lists, "" for the document's id. Attributes: num_stored: chunks with KV in the store. omissions:
        parts left out of the document. settled: the document was committed or undone.
        """
        [self.chunks] = plan_texts(collection, [document], settings, cancellation)
        record = document_record(collection, document, self.chunks, settings)
        self._record = replace(record, settings={**record.settings, TITLE: shortened(title)}) if title else record
        self._store, self._old = store, store.get_document(*record.place)
        self._new = {p.key for p in self.chunks if not store.has_chunk(p.key)}
        wanted = {p.key: p for p in self.chunks if not store.has_kv(p.key)}
        self.missing = list(wanted.values())
        self._collector = Collector(collection, store, {p.key for p in self.chunks} | {collection.prefix_key})
        self._launches = self._collect()
        self.num_stored = len(self.chunks) - len(self.missing)
        self.omissions = document.omissions
        self.settled = False

    @property
    def is_new(self) -> bool:
        """Return whether no document was stored under this name."""
        return self._old is None

    def collect(self) -> bool:
        """Run the next launch, in the engine's thread. Return whether there are more."""
        return next(self._launches, False)

    def _collect(self) -> Iterator[bool]:
        if self.missing:
            self._collector.begin()
            yield True
            for _ in self._collector.store(self.missing, fetch=False):  # answers wait meanwhile
                self.num_stored += 1
                yield True

    def commit(self) -> None:
        """List the document. Any thread; call it once `collect` has returned False."""
        self._collector.store_texts([p for p in self.chunks if not self._store.has_chunk(p.key)])
        if is_news(self._record, self._old):
            self._store.put_documents([self._record])
        self.settled = True

    def undo(self) -> None:
        """Remove the new chunks of a document that is not committed. A failure is logged."""
        self.settled = True
        try:
            self._store.transact(self._remove_new)
        except StoreError as error:
            logger.error("chunks of a document that was refused stay in the store: %s", error.message)

    def _remove_new(self, writer: StoreWriter) -> None:
        for key in self._new:
            if not writer.is_referred(key):  # another document with this chunk may have been committed meanwhile
                writer.delete_chunk(key)
