"""Errors for a question without usable chunks. They name the differences between the nearest stored collection and the
requested one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_store import ChunkStore

from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.records import CollectionRecord, kept_records

_PRECOMPUTE = "precompute the documents as you ask for them"


@dataclass(frozen=True)
class _Difference:
    """One difference between two collections."""

    stored: str  # stored value, worded to follow "for MODEL"
    asked: str  # requested value, worded the same way
    to_do: str = ""  # flag that selects the stored chunks


def nothing_found(store: ChunkStore, collection: Collection, usable: Sequence[Collection]) -> NotFoundError:
    """Return the error for a question without results. usable: collections that the question could use."""
    counts, models = Counter[str](), dict[str, str]()
    for manifest in store.chunks():
        counts[manifest.collection] += 1
        models[manifest.collection] = manifest.model_name
    model = collection.model.name
    if own := sum(counts[one.id] for one in usable):
        return NotFoundError(
            f"none of the {own} chunks stored for {model} matches the question",
            "use other words, or name chunks: --chunks ID,ID (cacheblend chunks ls lists them)",
        )
    if not counts:
        return NotFoundError(f"nothing is stored in {store.path} yet", "store documents: cacheblend precompute PATH")
    known, codecs = kept_records(store), {one.codec for one in usable}
    found = {name: _differences(known.get(name), models[name], collection, codecs) for name in counts}
    nearest = min(counts, key=lambda name: (models[name] != model, len(found[name]), -counts[name]))
    differences, count = found[nearest], counts[nearest]
    rest = counts.total() - count
    to_do = [difference.to_do for difference in differences if difference.to_do]
    return NotFoundError(
        f"{count} chunk{'s are' if count != 1 else ' is'} stored for "
        f"{_for(models[nearest], [d.stored for d in differences])}"
        + (f" (and {rest} for others)" if rest else "")
        + f"; you ask for {_for(model, [d.asked for d in differences])}",
        f"ask with {' and '.join(to_do)}, or {_PRECOMPUTE}" if to_do else _PRECOMPUTE,
    )


def _for(model: str, differences: list[str]) -> str:
    return " ".join(filter(None, [model, *differences]))


def _differences(
    record: CollectionRecord | None, model_name: str, collection: Collection, codecs: set[str]
) -> list[_Difference]:
    """Compare a stored collection with the requested one.

    If the model differs, return only that. codecs: usable codecs.
    """
    own = CollectionRecord.of(collection)
    if model_name != own.model_name and (record is None or record.identity != own.identity):
        return [
            _Difference("", "", f"--model {model_name} (cacheblend config set model {model_name} makes it the default)")
        ]
    earlier = _Difference("by an earlier version of cacheblend", "now: precompute replaces them")
    if record is None:
        return [earlier]
    if record.identity != own.identity:
        return [
            _Difference(
                "in an earlier version", "in its current version: the files, or how they are read, have changed"
            )
        ]
    found = []
    if record.dtype != own.dtype:
        found.append(_Difference(f"in {record.dtype}", f"in {own.dtype}", f"--dtype {record.dtype}"))
    if record.weight_dtype != own.weight_dtype:
        words = {"auto": "as they are"}
        then, now = (f"with weights {words.get(r.weight_dtype, f'in {r.weight_dtype}')}" for r in (record, own))
        found.append(_Difference(then, now, f"--weight-dtype {record.weight_dtype}"))
    if record.adapter != own.adapter:
        found.append(_two("adapter", record.adapter, own.adapter, "--lora"))
    if record.tokenizer != own.tokenizer:
        found.append(_Difference("with another tokenizer", ""))
    if record.codec not in codecs:
        found.append(_Difference(f"as {record.codec}", f"as {own.codec}", "the setting kv_dtype auto"))
    if record.prefix != own.prefix:
        found += _prefix_differences(record, own)
    if record.salt != own.salt:
        found.append(_two("salt", record.salt, own.salt, "--salt"))
    return found or [earlier]


def _prefix_differences(record: CollectionRecord, own: CollectionRecord) -> list[_Difference]:
    flags = record.wording.differences(own.wording)
    found = [_Difference(f"with {stored}", f"with {asked}", _to_ask_with(stored)) for stored, asked in flags]
    if record.day != own.day:
        found.append(_Difference(f"on {record.day}", f"on {own.day}"))
    return found or [_Difference("with a different prompt prefix", "with the prefix of the current template")]


def _two(name: str, stored: str, asked: str, flag: str) -> _Difference:
    """Describe how two digests differ; "" means none."""
    article = "an" if name[0] in "aeiou" else "a"
    if not stored:
        return _Difference(f"without {article} {name}", "with one", f"no {flag}")
    with_one = (f"with another {name}", "with yours") if asked else (f"with {article} {name}", "without one")
    return _Difference(*with_one, f"the {flag} they were stored with")


def _to_ask_with(flag: str) -> str:
    """Return the flag to ask with. A prompt file cannot be named, because only its text is known."""
    return "the --prompt they were stored with" if flag.startswith("--prompt") else flag
