"""Base of an engine: documents given as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import TYPE_CHECKING

from cacheblend_store import ChunkStore
from cacheblend_store.format.blobs import REMOVED

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.engine.engine_thread import EngineThread
from cacheblend_cli.engine.stored_documents import StoredDocuments
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.settings import of_settings

_COMMIT_S = 0.25  # seconds of launches to commit together
if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import CollectedChunk
    from cacheblend_cli.collect.missing import MissingChunks
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.collect.texts import AddedDocument, Putting
    from cacheblend_cli.corpus.documents import Document


class Documents(EngineThread, StoredDocuments):
    """Stores, checks and names documents. Only `add` may be called while requests run."""

    def put(
        self,
        store: ChunkStore,
        document: Document,
        salt: str = "",
        title: str = "",
        cancellation: Cancellation | None = None,
    ) -> Putting:
        """Cut a document to be stored: call the result's `collect` by `between_steps` until it returns False, then
        `commit`; or `undo`. Raises TextRefused, and Cancelled if it is cancelled while it is cut."""
        from cacheblend_cli.collect.texts import Putting

        return Putting(self.collection(store, salt), store, document, self._collect_settings(), title, cancellation)

    def missing(self, store: ChunkStore, salt: str = "") -> MissingChunks | None:
        """Return the chunks of documents to compute between steps while nobody waits for an answer.

        None for a store that is not written to or has a tier, for a model on several ranks, and for a hybrid, which
        computes the chunks of a document in order.
        """
        is_own = store.writable and store.is_own and store.tier is None
        if not is_own or self.is_parallel or self.model.spec.recurrent:
            return None
        from cacheblend_cli.collect.missing import MissingChunks

        def collections() -> list[Collection]:
            usable = self.runtime.collections(salt, self.runtime.day(store, salt))
            return [of for of in usable if not of.computed_in and of.codec not in REMOVED]

        return MissingChunks(store, collections, self.service.check_unwanted)

    def collecting(
        self,
        store: ChunkStore,
        keys: Sequence[bytes],
        codec: str,
        salt: str = "",
        day: date | None = None,
        *,
        again: bool = False,
    ) -> Iterator[CollectedChunk]:
        """Compute the KV of stored chunks of one collection in this order: call `next` by `between_steps`.

        again: compute those that have KV, too. Otherwise they are not among the results. Raises NotFoundError, and
        UsageError for chunks of another collection.
        """
        from cacheblend_cli.collect.collector import Collector, planned_of

        collection = self.collection(store, salt, day).in_codec(codec)
        with store.read() as reader:
            found = {key: reader.undamaged(key) for key in keys}
        if lost := [key.hex()[:12] for key, manifest in found.items() if manifest is None]:
            raise NotFoundError(f"no chunk {lost[0]} in the store", "run precompute again")
        manifests = list(filter(None, found.values()))
        if other := [manifest.id[:12] for manifest in manifests if manifest.collection != collection.id]:
            what = f"chunk {other[0]} was cut for another model, prompt or date than this engine's"
            raise UsageError(what, "end the engine (cacheblend stop), then run precompute again")
        planned = [planned_of(manifest) for manifest in manifests if again or not manifest.has_kv]
        collector = Collector(collection, store, set(keys), only_known=True)
        return collector.store(planned, again=again, every_s=_COMMIT_S)

    def add(self, store: ChunkStore, texts: Iterable[tuple[str, str]]) -> list[AddedDocument]:
        """Store documents, each (id, text), replacing documents with the same ids, and compute their KV now.

        Raises UsageError for an empty text, and StoreErrors.
        """
        from cacheblend_cli.collect.texts import AddedDocument, document_of, put_name

        self.use(store)
        added = []
        for document_id, text in texts:
            document = document_of(put_name("", document_id), text, None)
            putting = self.put(store, document, self._resolved.settings.salt)
            try:
                while self.service.between_steps(putting.collect).result():
                    pass
                putting.commit()
            except Exception:
                putting.undo()
                raise
            added.append(AddedDocument(document_id, tuple(planned.key.hex() for planned in putting.chunks)))
        return added

    def _collect_settings(self) -> CollectSettings:
        from cacheblend_cli.collect.settings import CollectSettings

        return of_settings(CollectSettings, self._resolved.settings)
