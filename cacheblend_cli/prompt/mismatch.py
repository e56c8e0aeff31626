"""Errors for a question without usable chunks: how the nearest stored collection differs from the requested one."""

from __future__ import annotations

from collections.abc import Collection as Ids
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from cacheblend_store import ChunkManifest, ChunkStore, KeyParts, collection_id
from cacheblend_store.format.keys import REPLACED_CODECS

from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.model.linear import WEIGHT_DTYPES
from cacheblend_cli.model.loading import DTYPES, LoadedModel, model_fingerprint
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.kept import other_wordings
from cacheblend_cli.prompt.wording import Wording

_PRECOMPUTE = "precompute the documents as you ask for them"


@dataclass
class _Stored:
    """A collection in the store: one of its chunks, their number, and the ids of its prefix if they are stored."""

    sample: ChunkManifest
    chunks: int = 0
    prefix_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Difference:
    """stored, asked: both values, worded to follow "for MODEL". to_do: flag to use the stored chunks."""

    stored: str
    asked: str
    to_do: str = ""


def nothing_found(store: ChunkStore, collection: Collection, usable: Ids[str]) -> NotFoundError:
    """Return the error for a question without results. usable: ids of the collections that could be used."""
    groups = _stored(store)
    own = sum(group.chunks for name, group in groups.items() if name in usable)
    model = collection.model.name
    if own:
        return NotFoundError(
            f"none of the {own} chunks that are stored for {model} has a word of the question",
            "ask in other words, or name chunks: --chunks ID,ID (cacheblend chunks ls lists them)",
        )
    worded = {of.prefix_ids: wording for of, wording in other_wordings(store, collection)}
    others = [
        (group, _differences(collection, group.sample, group.prefix_ids, usable, worded)) for group in groups.values()
    ]
    others = [(group, found) for group, found in others if group.chunks]
    if not others:
        return NotFoundError(f"nothing is stored in {store.path} yet", "store documents: cacheblend precompute PATH")
    group, found = min(others, key=lambda other: (other[0].sample.model_name != model, len(other[1]), -other[0].chunks))
    rest = sum(other.chunks for other, _ in others) - group.chunks
    to_do = [difference.to_do for difference in found if difference.to_do]
    return NotFoundError(
        f"{_say(group.chunks, group.sample.model_name, [d.stored for d in found])}"
        + (f" (and {rest} for others)" if rest else "")
        + f"; you ask for {_for(model, [d.asked for d in found])}",
        f"ask with {' and '.join(to_do)}, or {_PRECOMPUTE}" if to_do else _PRECOMPUTE,
    )


def _say(count: int, model: str, differences: list[str]) -> str:
    return f"{count} chunk{'s are' if count != 1 else ' is'} stored for {_for(model, differences)}"


def _for(model: str, differences: list[str]) -> str:
    return " ".join(filter(None, [model, *differences]))


def _stored(store: ChunkStore) -> dict[str, _Stored]:
    groups: dict[str, _Stored] = {}
    for manifest in store.chunks(prefixes=True):
        group = groups.setdefault(manifest.collection, _Stored(manifest))
        if manifest.context == "prefix":
            group.prefix_ids = manifest.token_ids
        else:
            group.chunks += 1
            group.sample = manifest  # a prefix has a codec of its own
    return groups


def _differences(
    collection: Collection,
    sample: ChunkManifest,
    prefix_ids: tuple[int, ...] | None,
    usable: Ids[str],
    worded: Mapping[tuple[int, ...], Wording],
) -> list[_Difference]:
    """Compare a stored collection with the requested one; for another model, return only that. prefix_ids: of the sample's
    collection, None if unknown. worded: prefixes of other wordings."""
    model, found = collection.model, []
    if sample.model != model.fingerprint and not (found := _model_differences(model, sample.model)):
        if sample.model_name != model.name:
            return [_Difference("", "", f"--model {sample.model_name}")]
        now = "as it is now: its files, its adapter (--lora) or how they are read have changed"
        return [_Difference("as it was then", now)]
    if sample.tokenizer != model.tokenizer.fingerprint:
        found.append(_Difference("with another tokenizer", ""))
    if (earlier := _earlier_encoding(collection, sample)) is not None:
        return [earlier]
    if replace(collection, codec=sample.codec).id not in usable:
        found.append(_Difference(f"as {sample.codec}", f"as {collection.codec}", "--kv-dtype auto"))
    return found + _prompt_differences(collection, sample, prefix_ids, worded)


def _model_differences(model: LoadedModel, stored: str) -> list[_Difference]:
    """Compare a model with a stored fingerprint: the same model in another dtype, weight dtype or without its adapter."""
    ours = str(model.decoder.dtype).removeprefix("torch.")
    loras = dict.fromkeys((model.lora_digest, ""))
    for (name, dtype), lora, weights in product(DTYPES.items(), loras, WEIGHT_DTYPES):
        if model_fingerprint(model.spec, model.path, dtype, lora, weights) == stored:
            found = [] if name == ours else [_Difference(f"in {name}", f"in {ours}", f"--dtype {name}")]
            if weights != model.weight_dtype:
                dtype_words = {"auto": "as they are"}
                then, now = (f"with weights {dtype_words.get(w, f'in {w}')}" for w in (weights, model.weight_dtype))
                found.append(_Difference(then, now, f"--weight-dtype {weights}"))
            if lora != model.lora_digest:
                found.append(_Difference("without an adapter", "with one", "no --lora"))
            return found
    return []


def _earlier_encoding(collection: Collection, sample: ChunkManifest) -> _Difference | None:
    """Return the difference of a collection stored by an earlier version in a codec that is encoded otherwise now."""
    former = replace(collection, codec=sample.codec, codec_version=1)
    if sample.codec not in REPLACED_CODECS or former.id != sample.collection:
        return None
    return _Difference(
        f"in the {sample.codec} of an earlier version, which is no longer read", f"as {collection.codec}"
    )


def _prompt_differences(
    collection: Collection,
    sample: ChunkManifest,
    prefix_ids: tuple[int, ...] | None,
    worded: Mapping[tuple[int, ...], Wording],
) -> list[_Difference]:
    """Find the prefix and salt of a collection by trying candidates: its id is a digest of them."""

    def explained(prefix: tuple[int, ...], salt: str) -> bool:
        parts = KeyParts(sample.model, sample.tokenizer, prefix, (), sample.codec, salt)
        return collection_id(parts) == sample.collection

    prefix = collection.prefix_ids if prefix_ids is None else prefix_ids
    if prefix_ids is None:
        salts = (collection.salt, "")
        prefix = next((p for p in (prefix, *worded) if any(explained(p, salt) for salt in salts)), prefix)
    found = []
    if prefix in worded:
        flags = worded[prefix].differences(collection.template.wording)
        found += [_Difference(f"with {stored}", f"with {asked}", _to_ask_with(stored)) for stored, asked in flags]
    elif prefix != collection.prefix_ids:
        found.append(_Difference("behind another beginning of the prompt", "behind what its template makes now"))
    if explained(prefix, collection.salt):
        return found
    if explained(prefix, ""):
        return [*found, _Difference("without a salt", "with one", "no --salt")]
    if prefix_ids is None:
        return [*found, _Difference("with another salt or behind another beginning of the prompt", "")]
    stored, asked = ("with another salt", "with yours") if collection.salt else ("with a salt", "without one")
    return [*found, _Difference(stored, asked, "the --salt they were stored with")]


def _to_ask_with(flag: str) -> str:
    """Return the flag to ask with; of a prompt file only the text is known."""
    return "the --prompt they were stored with" if flag.startswith("--prompt") else flag
