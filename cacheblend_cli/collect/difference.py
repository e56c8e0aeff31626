"""Compare a plan with the store: chunks that a run computes and removes, and the reasons."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cacheblend_store import Amount, ChunkStore

from cacheblend_cli.collect.collector import Collector
from cacheblend_cli.collect.corpus_diff import CorpusDiff
from cacheblend_cli.collect.document_records import StoredDocument
from cacheblend_cli.collect.plan import Part, PlannedDocument
from cacheblend_cli.collect.room import Room
from cacheblend_cli.collect.summaries import ChunkSize, PrefillRows
from cacheblend_cli.prompt.collection import Collection

_MEASURED_S = 2.0  # of a measurement, or a tenth of the work: others use the machine in bursts


@dataclass
class Missing:
    """Chunks of one collection to compute."""

    collection: Collection
    chunks: int = 0
    tokens: int = 0
    num_rows: int = 0  # of their prefills
    _rows: PrefillRows = field(default_factory=PrefillRows)

    def add(self, size: ChunkSize) -> None:
        self.chunks += 1
        self.tokens += size.num_tokens
        self.num_rows += self._rows.add(size)


@dataclass
class Difference:
    """Changes that a run makes to the store."""

    new: Amount = field(default_factory=Amount)  # chunks to compute: of new documents, or stored without KV
    replaced: Amount = field(default_factory=Amount)  # other chunks to compute, of changed documents
    unchanged: Amount = field(default_factory=Amount)
    removed: Amount = field(default_factory=Amount)
    # (flag as stored, flag now) -> number of documents to compute again because of it. A document can count several
    # times.
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    missing: list[Missing] = field(default_factory=list)  # chunks to compute, per collection
    seconds: float = 0.0  # estimated time to compute the missing chunks, 0 if unknown
    is_measured: bool = False  # the time is from a measurement, not from earlier runs

    @property
    def computed_tokens(self) -> int:
        return sum(missing.tokens for missing in self.missing)

    @property
    def num_rows(self) -> int:
        """Rows of prefill that compute them."""
        return sum(missing.num_rows for missing in self.missing)


def compare(
    store: ChunkStore | None, diff: CorpusDiff, plan: list[Part], room: Room, *, force: bool = False
) -> Difference:
    """Return the changes from storing the plan. room: chunks that should have KV. force: compute all of these again."""
    comparison = _Comparison(store, diff, room, force)
    for part in plan:
        comparison.add_settled(part)
    for part in plan:
        missing = Missing(part.collection)
        for document in part.documents:
            comparison.add_document(part, document, missing)
        comparison.found.missing.append(missing)
    if store is not None:
        _count_removed(comparison.found, store, _leaving(diff, plan), comparison.planned)
    return comparison.found


class _Comparison:
    """Counts the chunks of a plan, each key once."""

    def __init__(self, store: ChunkStore | None, diff: CorpusDiff, room: Room, force: bool) -> None:
        self._store, self._diff, self._room, self._force = store, diff, room, force
        self.found, self.planned = Difference(), set[bytes]()

    def add_settled(self, part: Part) -> None:
        amount, stored_bytes = self.found.unchanged, cache(part.stored_bytes)
        for key, num_tokens in part.settled.chunks():
            if key not in self.planned:
                self.planned.add(key)
                amount.add(num_tokens, stored_bytes(num_tokens))

    def add_document(self, part: Part, document: PlannedDocument, missing: Missing) -> None:
        """Count a document's chunks, and why some are computed. missing: gets the chunks to compute."""
        source, before = document.file.source, missing.chunks
        own = self._diff.replaced(source, part.collection, part.settings.context)
        had = {key for record in own for key in record.chunk_keys}
        for size in document.sizes:
            if size.key not in self.planned:
                self.planned.add(size.key)
                is_new = not own or (size.key in had and not size.has_kv)
                self._add(part, size, missing, self.found.new if is_new else self.found.replaced)
        if missing.chunks == before or self._force:
            return
        if versions := own or self._diff.versions(source):
            self.found.changes.update(_changes(max(versions, key=lambda r: r.updated), self._diff, part))
        elif source in self._diff.worded:
            self.found.changes.update(self._diff.worded[source].differences(part.collection.template.wording))

    def _add(self, part: Part, size: ChunkSize, missing: Missing, changed: Amount) -> None:
        """Count a chunk. changed: amount to add it to if it is not stored."""
        kept, num_bytes = size.key in self._room, part.stored_bytes(size.num_tokens)
        is_stored = not self._force and size.has_kv is not None and (size.has_kv or not kept)
        amount = self.found.unchanged if is_stored else changed
        amount.add(size.num_tokens, num_bytes if kept else 0)
        if kept and not is_stored:
            missing.add(size)


def _changes(record: StoredDocument, diff: CorpusDiff, part: Part) -> list[tuple[str, str]]:
    """Return (flag as stored, flag now) for each setting that differs between a document's record and this run."""
    unset: dict[str, Any] = {"overlap": 0, "head": ""}
    was = {**unset, **record.settings, "context": record.context, "kv_dtype": diff.codecs[record.collection]}
    now = unset | {"head": part.collection.template.wording.head, **part.settings.of_record()}
    now |= {"context": part.settings.context, "kv_dtype": part.collection.codec}
    if record.collection in diff.earlier:
        if (day := diff.earlier[record.collection]) is not None:
            was["date"], now["date"] = day, part.collection.day
        else:
            was["kv_dtype"] = f"{was['kv_dtype']} of an earlier version"
    flags = {name: f"--{name.replace('_', '-')}" for name in now} | {"head": "--prompt's {source}"}
    differing = [name for name, value in now.items() if name in was and was[name] != value]
    return [(f"{flags[name]} {_as_flag(was[name])}", f"{flags[name]} {_as_flag(now[name])}") for name in differing]


def _as_flag(value: Any) -> Any:
    """Return a value as it is written after its flag. Prompt text is stripped and quoted."""
    return repr(value.strip()) if isinstance(value, str) and (not value or " " in value or "{" in value) else value


def _leaving(diff: CorpusDiff, plan: list[Part]) -> dict[bytes, StoredDocument]:
    """Return the records that the run replaces or removes, by store key."""
    places = {(p.collection.id, d.file.source, p.settings.context) for p in plan for d in p.documents}
    ending = {record.place for record in diff.gone.values()}

    def leaves(record: StoredDocument) -> bool:
        if record.place in ending:  # a moved document's record stays, unless it is stored anew under its new name
            name = diff.names.get(record.content_digest)
            return name is None or (record.collection, name, record.context) in places
        return record.place in places or diff.is_outdated(record)

    return {key: record for key, record in (diff.stored | diff.gone).items() if leaves(record)}


def _count_removed(
    found: Difference, store: ChunkStore, leaving: Mapping[bytes, StoredDocument], planned: set[bytes]
) -> None:
    with store.read() as reader:
        for key in sorted({key for record in leaving.values() for key in record.chunk_keys if key not in planned}):
            manifest = reader.undamaged(key)
            if manifest is not None and all(document in leaving for document in reader.documents_of(key)):
                found.removed.add(manifest.num_tokens, manifest.num_bytes)


def estimate_seconds(missing: Sequence[Missing]) -> float:
    """Estimate the seconds to compute and encode these chunks, from measured prefills of one sequence as long as a
    pack."""
    return sum(_row_s(of.collection, of.num_rows) * of.num_rows for of in missing if of.chunks)


def _row_s(collection: Collection, num_rows: int) -> float:
    from cacheblend_cli.collect.encoding import encoded
    from cacheblend_cli.collect.prefill import CollectSequence, Kept, collect, pack_tokens

    decoder, prefix = collection.decoder, Collector(collection).prefix
    size = max(1, collection.window(min(pack_tokens(decoder.device), num_rows)))
    ids = tuple(i % collection.model.spec.vocab_size for i in range(size))  # a router sends equal tokens to few experts
    probe, times = CollectSequence(ids, (Kept(b"", 0, size),)), list[float]()
    while len(times) < 2 or sum(times[1:]) < min(_MEASURED_S, times[-1] / size * num_rows / 10):
        start = time.perf_counter()
        for _ in encoded(collect(decoder, prefix, [probe]), collection.codec):
            pass
        times.append(time.perf_counter() - start)
    return sum(times[1:]) / len(times[1:]) / size  # the first one reads the weights
