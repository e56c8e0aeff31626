"""The loader of a prompt's stored KV, and what all ranks of a model agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from cacheblend_store import StoreError

from cacheblend_cli.kv.loader import HostLoader, KVLoader
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.source import BadChunk, KVSource
from cacheblend_cli.kv.stored_prompt import LookUp, StoredPrompt
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan, Segment

if TYPE_CHECKING:
    from cacheblend_cli.kv.host_cache import HostCache
    from cacheblend_cli.model.states import SequenceState


def make_loader(
    decoder: Decoder,
    source: KVSource | None,
    sequence: PagedSequence,
    plan: PromptPlan,
    host_cache: HostCache | None = None,
) -> KVLoader:
    """Return the loader of the plan's cached segments. Raises BadChunk if the source no longer has one of them.

    source: may be None for a plan without cached segments. host_cache: of a GPU.
    """
    if not plan.stored:
        return KVLoader()
    missing: BadChunk | None = None
    try:
        stored = StoredPrompt.find(decoder, source, sequence, plan, host_cache or LookUp())
    except BadChunk as error:
        missing = error
    agree(decoder, plan, missing)
    if decoder.device.type != "cuda":
        return HostLoader(stored)
    from cacheblend_cli.kv.cuda_loader import CudaLoader

    return CudaLoader(stored, host_cache)


def stored_state(decoder: Decoder, source: KVSource | None, segment: Segment) -> SequenceState:
    """Return the recurrent state after a stored segment. Raises BadChunk."""
    assert decoder.state_layout is not None
    assert segment.key is not None
    try:
        if source is None:
            raise StoreError("the store cannot be read")
        with source.read() as reader:
            manifest = reader.manifest(segment.key)
            if manifest is None or manifest.state != decoder.state_layout.stored:
                raise StoreError("it has no state of this model's recurrent layers in this dtype")
            return decoder.state_layout.from_bytes(reader.state_of(manifest), decoder.device)
    except StoreError as error:
        raise BadChunk(segment.key, error.message) from error


def agree(decoder: Decoder, plan: PromptPlan, bad: BadChunk | None) -> None:
    """Raise BadChunk on all ranks if one of them could not read a chunk. bad: the chunk that this rank could not
    read."""
    if decoder.part.is_whole:
        if bad is not None:
            raise bad
        return
    cached = plan.stored
    if not cached:
        return
    ranks = decoder.part.ranks
    own = 0 if bad is None else 1 + next(i for i, s in enumerate(cached) if s.key == bad.key)
    code = int(ranks.largest(torch.tensor([own * ranks.size + ranks.rank if own else 0], device=decoder.device)))
    if code:
        key = cached[code // ranks.size - 1].key
        assert key is not None
        raise (
            bad if bad is not None and bad.key == key else BadChunk(key, f"rank {code % ranks.size} could not read it")
        )
