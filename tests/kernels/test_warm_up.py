"""What the warm-up launches is what prefill and decode of any size may launch: nothing is compiled later."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from cacheblend_kernels import AttentionMetadata, AttentionParams, LayerCache
from cacheblend_kernels.triton_backend.backend import TritonBackend
from launches import Launch, recorded

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 96, 128, 160, 224, 256, 300, 384, 512, 544, 700, 2100)
CONTEXTS = (1, 256, 511, 512, 768, 1024, 1500, 2048, 4096, 8192, 16384)


def metadata(rows: int, keys: int, contiguous_slot: int) -> AttentionMetadata:
    return AttentionMetadata(
        torch.zeros(rows, dtype=torch.int64),
        torch.tensor([0, rows], dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.tensor([keys], dtype=torch.int32),
        contiguous_slots=(contiguous_slot,),
        max_kv_len=keys,
    )


def kinds(launches: list[Launch]) -> set[Any]:
    return {(launch.key, launch.aligned) for launch in launches}


def launch_every_size(backend: TritonBackend, q: torch.Tensor, cache: LayerCache, params: AttentionParams) -> None:
    for slot in (-1, 0):
        for keys in CONTEXTS:
            for rows in ROWS:
                meta = metadata(rows, keys, slot)
                backend.prefill_attention(q[:rows], cache, meta, params)
                backend.attention_peaks(q[:rows], meta.positions, cache, meta, params, torch.zeros(keys))
            for batch in (1, 2, 4, 8, 64):
                one = metadata(1, keys, slot if batch == 1 else -1)
                meta = replace(one, kv_lens=one.kv_lens.repeat(batch), block_table=one.block_table.repeat(batch, 1))
                backend.decode_attention(q[:batch], cache, meta, params)


@pytest.mark.parametrize(
    ("heads", "head_dim", "arch", "dtype", "window", "count"),
    [
        (
            (32, 8),
            128,
            90,
            torch.bfloat16,
            None,
            57,
        ),  # 3 tiles and decode, 6 numbers of splits, paged or not; 5 joins; peaks
        ((32, 8), 128, 90, torch.bfloat16, 1024, 30),
        ((14, 2), 64, 80, torch.bfloat16, None, 66),
        ((7, 1), 64, 90, torch.float32, None, 38),
    ],
)
def test_every_size_is_among_the_warmed(
    heads: tuple[int, int], head_dim: int, arch: int, dtype: torch.dtype, window: int | None, count: int
) -> None:
    num_heads, num_kv_heads = heads
    q = torch.zeros(max(ROWS), num_heads, head_dim, dtype=dtype)
    cache = LayerCache(*(torch.zeros(2, 64, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)))
    params = AttentionParams(0.1, window)
    with recorded(arch) as warmed:
        backend = TritonBackend(CPU, arch=arch, num_sms=132)
        backend.warm_up(q[:1], cache, params, max(CONTEXTS))
    with recorded(arch) as launched:
        launch_every_size(backend, q, cache, params)
    assert kinds(warmed) == kinds(launched)  # nor is anything compiled that no size needs
    assert len(kinds(warmed)) == count
