"""Requests to hybrids: stored KV is restored at the beginning of a prompt, and nothing is blended."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from cacheblend_cli.corpus.places import shown
from cacheblend_cli.engine.request.chunks import ChunkRecords
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.types import AskRequest, BlendParams

MOST_ADDED = 8192
"""Tokens that a search may add to a prompt, to begin with a document whose KV is restored: loading them takes a small
part of the time that computing the found chunks takes."""


def exact_only(ask: AskRequest, name: str) -> BlendParams:
    """Return the request's use of stored KV without blending. name: of the model. Raises UsageError for settings of
    blending."""
    blend = ask.blend
    if ask.options.auto or (blend.mode == "blend" and replace(blend, seed=0) != BlendParams()):
        raise UsageError(
            f"{name} has recurrent layers, which need every token in order: there is no ratio, and no selector",
            "leave --ratio, --selector and what belongs to them out: KV is restored where it is exact",
        )
    return replace(blend, selector="all") if blend.mode == "blend" else blend


def check_reuse(request: Request) -> None:
    """Raise UsageError for mode reuse, if stored KV is needed elsewhere than at the beginning."""
    if request.blend.mode == "reuse" and any(s.status == "computed" for s in request.plan.chunks):
        raise UsageError(
            f"--mode reuse is not possible: {request.collection.model.name} has recurrent layers, so stored KV is right "
            "only at the beginning of a prompt",
            "leave --mode out: the other chunks are computed",
        )


def from_beginning(
    collection: Collection,
    stored: ChunkRecords,
    documents: list[list[bytes]],
    source_of: Mapping[bytes, str],
    room: int,
    notes: list[str],
) -> list[list[bytes]]:
    """Return the keys of a search's hits by document, with a document first that can be restored from its beginning to
    its hits: the one with the best hit, if possible.

    room: tokens that fit the prompt beside the hits. notes: gets one on the chunks that are added.
    """
    for keys in documents:
        source = source_of[keys[0]]
        every = stored.keys_of(collection.id, source, "document")
        for last in reversed(keys):
            run = every[: every.index(last) + 1] if last in every else []
            manifests = [m for key in run if (m := stored.get(key)) is not None and m.has_kv]
            more = sum(m.num_tokens for m in manifests if m.key not in keys)
            is_whole = len(manifests) == len(run) and any(m.state for m in manifests)
            if is_whole and more <= min(MOST_ADDED, room):
                if added := sum(key not in keys for key in run):
                    what = "1 more chunk" if added == 1 else f"{added} more chunks"
                    notes.append(
                        f"{what} of {shown(source)}: its KV is restored from its beginning to the chunks found"
                    )
                rest = [key for key in keys if key not in run]
                return [[*run, *rest], *(other for other in documents if other is not keys)]
    return documents


def to_collect(request: Request, missing: Set[bytes]) -> set[bytes]:
    """Return the chunks to collect so that a prompt can begin with the missing ones: those at the beginning of the
    prompt, in the order of their document, up to the last missing one. Other missing chunks stay missing: a prompt like
    this cannot restore them."""
    behind, found, kept = tuple[int, ...](), set[bytes](), set[bytes]()
    for chunk in request.inputs:
        if chunk.left_context_ids != behind:
            break
        found.add(chunk.key)
        kept = set(found) if chunk.key in missing else kept
        behind += chunk.token_ids
    return kept
