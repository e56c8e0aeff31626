"""Errors for a question without usable chunks. They name the differences between the nearest stored collection and the
requested one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cacheblend_store import ChunkStore

from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.records import CollectionRecord, kept_records

_PRECOMPUTE = "precompute the documents as you ask for them"


def nothing_found(store: ChunkStore, collection: Collection, usable: Sequence[Collection]) -> NotFoundError:
    """Return the error for a question without results. usable: collections that the question could use."""
    counts, own = Counter((m.collection, m.model_name) for m in store.chunks()), CollectionRecord.of(collection)
    ids, codecs = {one.id for one in usable}, {one.codec for one in usable}
    if num_usable := sum(count for (name, _), count in counts.items() if name in ids):
        return NotFoundError(
            f"none of the {num_usable} chunks stored for {own.model_name} matches the question",
            "use other words, or name chunks: --chunks ID,ID (cacheblend chunks ls lists them)",
        )
    if not counts:
        return NotFoundError(f"nothing is stored in {store.path} yet", "store documents: cacheblend precompute PATH")
    known = kept_records(store)
    found = {of: _differences(known[of[0]], own, codecs) if of[0] in known else [] for of in counts}
    nearest = min(counts, key=lambda of: (of[1] != own.model_name, not found[of], len(found[of]), -counts[of]))
    model, record, pairs = nearest[1], known.get(nearest[0]), found[nearest]
    rest = counts.total() - counts[nearest]
    stored = f"{counts[nearest]} chunk{'s are' if counts[nearest] != 1 else ' is'} stored for {model}"
    others = f" (and {rest} for others)" if rest else ""
    if model != own.model_name and (record is None or record.identity != own.identity):
        hint = f"ask with --model {model} (cacheblend config set model {model} makes it the default), or {_PRECOMPUTE}"
        return NotFoundError(f"{stored}{others}; you ask for {own.model_name}", hint)
    if not pairs:
        what = f"{stored} by an earlier version of cacheblend or of the model's files{others}"
        return NotFoundError(what, "precompute the documents again: that replaces them")
    was, now = (" and ".join(flags) for flags in zip(*pairs, strict=True))
    message = f"{stored} with {was}{others}; you ask for {own.model_name} with {now}"
    return NotFoundError(message, f"ask with the settings they were stored with, or {_PRECOMPUTE}")


def _differences(record: CollectionRecord, own: CollectionRecord, codecs: set[str]) -> list[tuple[str, str]]:
    """Return (setting as stored, as requested) for each that differs between two collections of a model."""
    if record.identity != own.identity:
        return []
    flags = {"dtype": "--dtype", "weight_dtype": "--weight-dtype", "codec": "kv_dtype", "day": "the date"}
    pairs = [(name, flag, getattr(record, name), getattr(own, name)) for name, flag in flags.items()]
    found = [(f"{f} {a}", f"{f} {b}") for name, f, a, b in pairs if a != b and not (name == "codec" and a in codecs)]
    for flag, stored, asked in (("--lora", record.adapter, own.adapter), ("--salt", record.salt, own.salt)):
        if stored != asked:
            another = f"another {flag}" if asked else flag
            found.append((another if stored else f"no {flag}", flag if asked else f"no {flag}"))
    return found + record.wording.differences(own.wording)
