"""What a precompute finds: the documents on disk, and what the store has of them for the model, in any codec and context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cacheblend_store import ChunkStore, DocumentRecord
from cacheblend_store.format.layouts import CODECS

from cacheblend_cli.collect.document_records import gone_documents, stored_documents
from cacheblend_cli.collect.roots import Roots
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.documents import Document, Skipped
from cacheblend_cli.corpus.places import is_below
from cacheblend_cli.prompt.collection import Collection


@dataclass(frozen=True)
class Survey:
    """documents: in order. kept: name -> digest of the documents that are there, "" of those that nobody could read.
    stored: key in the store -> record, under the name the document has now. gone: the records of documents that are no
    more. codecs: by collection. roots: what the store remembers. collection: of any codec."""

    collection: Collection
    documents: list[Document]
    kept: dict[str, str]
    stored: dict[bytes, DocumentRecord]
    gone: list[DocumentRecord]
    codecs: dict[str, str]
    roots: Roots

    @cached_property
    def linked(self) -> dict[str, set[str]]:
        """Root -> names of the documents that links below it led to."""
        found: dict[str, set[str]] = {}
        for document in self.documents:
            if document.source != document.root and not is_below(document.source, document.root):
                found.setdefault(document.root, set()).add(document.source)
        return found

    @cached_property
    def names(self) -> dict[str, str]:
        """Digest -> a name of the document that says it."""
        return {document.digest: document.source for document in self.documents}

    def settings_of(self, name: str, root: str) -> CollectSettings:
        """How a document, or a root, was cut and collected when that was last said: by what is remembered of the nearest
        root; else as the last document below the root, or one that has moved there, is stored."""
        known = self.roots.nearest(name) or self.roots.nearest(root)
        if known is not None:
            return known.settings
        records = [r for r in self.stored.values() if r.source == root or is_below(r.source, root)]
        records = records or [r for r in self.gone if r.content_digest in self.names]
        for record in sorted(records, key=lambda r: r.updated, reverse=True):
            codec = self.codecs[record.collection]
            kv_dtype = "auto" if codec == self.collection.in_codec("auto").codec else codec
            if (found := CollectSettings.of_document(record, kv_dtype)) is not None:
                return found
        return CollectSettings()


def survey(
    collection: Collection,
    store: ChunkStore | None,
    documents: Iterable[Document | Skipped],
    paths: Sequence[str],
    on_skipped: Callable[[Skipped], None],
) -> Survey:
    """Read the documents, and compare. paths: the names of the paths that led to them."""
    found, kept, no_documents = list[Document](), dict[str, str](), set[str]()
    for document in documents:
        if isinstance(document, Document):
            found.append(document)
            kept[document.source] = document.digest
        else:
            on_skipped(document)
            if document.unread:
                kept[document.source] = ""
            else:
                no_documents.add(document.source)
    codecs = {replace(collection, codec=codec).id: codec for codec in CODECS}
    stored = {k: r for k, r in stored_documents(store).items() if r.collection in codecs} if store else {}
    roots = Roots(collection, store)
    gone = gone_documents(stored.values(), kept, no_documents | roots.unlinked(paths, kept.keys()), paths)
    return Survey(collection, found, kept, stored, gone, codecs, roots)
