"""Full prefills by torch's SDPA, which the benchmarks compare our kernel with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import AttentionCase, assert_close, attention_case, attention_reference
from torch.nn.attention import SDPBackend

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gpu import speeds

HALF = torch.float16


def full(length: int, **options: Any) -> AttentionCase:
    return attention_case(
        [list(range(length))],
        [length],
        **{"contiguous": True, "dtype": HALF, "block_size": 64} | options,
    )


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (7, 1)])
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_sdpa_equals_our_attention(kernel: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU another kernel stands for cuDNN's; what lies in the pool behind the rows is NaN, and reaches nothing."""
    monkeypatch.setitem(speeds.SDPA, "cudnn", SDPBackend.MATH)
    case = full(70, heads=heads, strided=True)
    out = speeds.sdpa_prefill(case.q, case.cache, case.meta.contiguous_slot, 0.125, kernel)
    assert out.is_contiguous()
    assert_close(out, attention_reference(case, 0.125), HALF)


def test_cudnn_sees_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for each."""
    seen = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((q.shape[2], k.shape[2], v.shape[2]))
        return q

    monkeypatch.setattr(speeds.F, "scaled_dot_product_attention", attention)
    for length in (1, 70, 256, 257, 300):
        case = full(length)
        out = speeds.sdpa_prefill(case.q, case.cache, case.meta.contiguous_slot, 0.125, "cudnn")
        assert out.shape == case.q.shape
    assert seen == [(n, n, n) for n in (256, 256, 256, 512, 512)]
