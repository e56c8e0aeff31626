"""Which loader a prompt gets."""

from __future__ import annotations

import torch

from cacheblend_cli.kv.host_loader import HostLoader
from cacheblend_cli.kv.loader import KVLoader, NothingToLoad
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.ring_loader import RingLoader
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.kv.staging import CudaTransfer, Transfer
from cacheblend_cli.kv.stored_prompt import StoredPrompt
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan


def make_loader(decoder: Decoder, source: KVSource | None, sequence: PagedSequence, plan: PromptPlan) -> KVLoader:
    """The loader of the plan's cached segments. Raises BadChunk where the source has one of them no more.

    source: may be None for a plan without such segments.
    """
    if not any(s.cached and s.token_ids for s in plan.segments):
        return NothingToLoad()
    assert source is not None, "what is cached is cached somewhere"
    stored = StoredPrompt.find(decoder, source, sequence, plan)
    transfer = transfer_to(decoder.device)
    return HostLoader(stored) if transfer is None else RingLoader(stored, transfer)


def transfer_to(device: torch.device) -> Transfer | None:
    """None: the device's memory is the host's, and the threads write straight into the pool."""
    return CudaTransfer(device) if device.type == "cuda" else None
