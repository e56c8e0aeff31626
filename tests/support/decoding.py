"""Decode one token of one sequence, for tests that have the token on the host."""

from __future__ import annotations

from torch import Tensor

from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload
from cacheblend_cli.kv.rows import next_rows
from cacheblend_cli.model.decoder import Decoder


def decode_one_token(decoder: Decoder, pool: KVPool, sequence: PagedSequence, token_id: int, position: int) -> Tensor:
    """Return fp32 logits [vocab_size] after token_id, in a sequence with `position` tokens before it."""
    rows = next_rows(decoder, [sequence], [position])
    return forward(decoder, rows, upload([token_id], decoder.device))[0]
