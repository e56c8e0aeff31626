"""A shard of one rank is the whole model, and its exchanges change nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import write_checkpoint

from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.parallel import Shard


def test_every_exchange_of_one_rank_returns_what_it_is_given(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2")
    spec, x = read_spec(tmp_path), torch.arange(6.0).view(2, 3)
    shard = Shard(spec)
    ranks = shard.ranks
    assert shard.is_whole
    assert shard.own is shard.whole is spec
    assert shard.vocabulary == (0, spec.vocab_size)
    exchanged = (ranks.sum(x), ranks.largest(x), ranks.of_first(x), shard.gathered_logits(x))
    of_heads = (shard.sum_of_kv(x, 0), shard.own_heads(x, 0), shard.all_heads(x, 0))
    assert all(found is x for found in (*exchanged, *of_heads))
    ranks.share(x)
    with ranks.telling(None):  # type: ignore[arg-type]
        assert torch.equal(x, torch.arange(6.0).view(2, 3))
