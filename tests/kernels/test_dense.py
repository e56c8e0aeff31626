"""Full prefills that torch's SDPA takes, and which do."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import AttentionCase, assert_close, attention_case, attention_reference, scattered
from torch.nn.attention import SDPBackend

pytest.importorskip("triton", reason="triton is not installed")
from cacheblend_kernels import AttentionParams
from cacheblend_kernels.triton_backend import dense
from cacheblend_kernels.triton_backend.backend import TritonBackend
from cacheblend_kernels.triton_backend.configs import DenseRoute
from launches import recorded

HALF = torch.float16


def full(length: int, **options: Any) -> AttentionCase:
    return attention_case(
        [list(range(length))],
        [length],
        **{"contiguous": True, "dtype": HALF, "block_size": 64} | options,
    )


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (7, 1)])
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_it_is_our_attention(kernel: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU another kernel stands for cuDNN's; what lies in the pool behind the rows is NaN, and reaches nothing."""
    monkeypatch.setitem(dense.SDPA, "cudnn", SDPBackend.MATH)
    case = full(70, heads=heads, strided=True)
    out = dense.sdpa_prefill(case.q, case.cache, case.meta.contiguous_slot, 0.125, kernel)
    assert out.is_contiguous()
    assert_close(out, attention_reference(case, 0.125), HALF)


def test_cudnn_sees_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for each."""
    seen = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((q.shape[2], k.shape[2], v.shape[2]))
        return q

    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", attention)
    for length in (1, 70, 256, 257, 300):
        case = full(length)
        out = dense.sdpa_prefill(case.q, case.cache, case.meta.contiguous_slot, 0.125, "cudnn")
        assert out.shape == case.q.shape
    assert seen == [(n, n, n) for n in (256, 256, 256, 512, 512)]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter makes the launches")
def test_only_what_was_measured_goes_there() -> None:
    plain, window = AttentionParams(0.125), AttentionParams(0.125, sliding_window=20)
    cases = {
        "full": (full(70), plain),
        "few rows": (full(63), plain),
        "window": (full(70), window),
        "fp32": (full(70, dtype=torch.float32), plain),
        "another head size": (full(70, head_dim=32), plain),
        "scattered": (attention_case([scattered(66, 70)], [70], contiguous=True, dtype=HALF, block_size=64), plain),
        "a suffix": (attention_case([list(range(4, 70))], [70], contiguous=True, dtype=HALF), plain),
        "paged": (full(70, contiguous=False), plain),
    }
    launched = {}
    for name, (case, params) in cases.items():
        with recorded(90) as launches:
            backend = TritonBackend(torch.device("cpu"), dense={(90, 64): DenseRoute("flash", 64)})
            backend.prefill_attention(case.q, case.cache, case.meta, params)
        launched[name] = bool(launches)
    assert [name for name, own in launched.items() if not own] == ["full"]
    with recorded(90) as launches:
        TritonBackend(torch.device("cpu")).prefill_attention(*vars(cases["full"][0]).values(), plain)
    assert launches  # nothing was measured yet
