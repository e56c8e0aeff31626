"""Documents of a store, for a model that need not be loaded. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

from cacheblend_store import ChunkStore

from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection

if TYPE_CHECKING:
    from cacheblend_cli.collect.corpus_diff import Paths
    from cacheblend_cli.collect.difference import Difference
    from cacheblend_cli.collect.events import PrecomputeEvent, PrecomputeReport
    from cacheblend_cli.collect.precompute import PrecomputeOptions


class StoredDocuments:
    """Finds the documents of a store, and brings them up to date."""

    prompts: Prompts

    def precompute(
        self,
        store: ChunkStore | None,
        paths: Sequence[str] | Paths,
        options: PrecomputeOptions,
        on_event: Callable[[PrecomputeEvent], None],
        confirm: Callable[[Difference], bool] | None = None,
        confirm_removal: Callable[[str, int], bool] | None = None,
    ) -> PrecomputeReport:
        """Bring the store up to date with the documents under `paths`. store None: a dry run.

        Unset options are taken from the store's record of the paths. confirm: called before documents are computed
        again because settings changed. confirm_removal: called with a folder and its number of stored documents before
        all of these are removed; None keeps them. Raises NotFoundError, UsageError, StoreErrors, DeviceError.
        """
        from cacheblend_cli.collect.corpus_diff import Paths
        from cacheblend_cli.collect.precompute import precompute

        if options.kv_dtype in (None, "auto") and self.prompts.config.kv_dtype != "auto":
            options = replace(options, kv_dtype=self.prompts.config.kv_dtype)
        if options.day is not None and self.prompts.template.day is None:
            raise UsageError(f"the chat template of {self.prompts.model.name} prints no date", "leave --date out")
        paths = paths if isinstance(paths, Paths) else Paths(paths)
        collection = self.collection(store, options.salt, options.day)
        return precompute(collection, store, paths, options, on_event, confirm, confirm_removal)

    def collection(self, store: ChunkStore | None, salt: str = "", day: date | None = None) -> Collection:
        """Return the collection of the store's documents. day: date that the template prints, None for the store's."""
        return self.prompts.collection(salt, day=day or self.prompts.day(store, salt))

    def usable(self, store: ChunkStore, salt: str = "") -> list[str]:
        """Return the ids of the collections whose chunks can be used."""
        return [of.id for of in self.prompts.collections(salt, self.prompts.day(store, salt))]

    def roots(self, store: ChunkStore, salt: str = "") -> list[str]:
        """Return the real paths that the store remembers for this model and salt."""
        from cacheblend_cli.collect.settings import SourceSettings

        return SourceSettings(self.prompts.collection(salt), store).paths
