"""Rows that fill a bucket of `LayerGraphs` change no other row. On a GPU layers are captured; in the interpreter the
functions of a capture run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.layer_graphs import LayerGraphs
from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload
from cacheblend_cli.kv.rows import rows_of

NUM_TOKENS, BLOCK_SIZE, NUM_BLOCKS = 100, 64, 4  # a block holds the rows that fill a bucket


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_padding_changes_no_row(
    family: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(LayerGraphs, "_capture", lambda graphs, function: function)
    write_checkpoint(tmp_path, family, num_hidden_layers=2)
    config = EngineConfig(model=str(tmp_path), device=device.type, attention_backend="triton", dtype="float32")
    decoder = Engine.load(config).model.decoder
    ids = [5 + 7 * i % 50 for i in range(NUM_TOKENS)]
    recomputed = [2, 3, 11, 67, *range(90, NUM_TOKENS)]  # rows with gaps between their positions
    with torch.inference_mode():
        pool = KVPool.of(decoder, NUM_BLOCKS, BLOCK_SIZE)
        for cache in pool.tensors:
            cache.fill_(torch.nan)
        graphs = LayerGraphs(decoder, pool, pool.allocator.allocate(1)[0])
        sequence = PagedSequence(pool, pool.new_sequence(NUM_TOKENS).blocks[::-1])

        def logits(positions: list[int]) -> torch.Tensor:
            rows = rows_of(decoder, sequence, upload(positions, device), NUM_TOKENS, NUM_TOKENS)
            return forward(decoder, rows, upload([ids[p] for p in positions], device))

        expected = logits([*range(NUM_TOKENS)])[recomputed]
        pool.layer_graphs = graphs
        for number in range(3):
            if graphs._buffers is not None:
                for name in ("delta", "residual"):
                    getattr(graphs._buffers, name).fill_(torch.nan)
            assert (logits(recomputed) - expected).abs().max() < 1e-4, number
            while graphs.capture_next():
                pass
        assert [len(captured.replays) for captured in graphs._buckets.values()] == [1]
        assert graphs._buffers is not None
        assert graphs._buffers.cu_rows.tolist() == [0, len(recomputed)]
