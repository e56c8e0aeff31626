"""The largest weight on each key against fp64 softmax over all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cacheblend_kernels import AttentionParams, KernelError
from cacheblend_kernels.triton_backend.attention_peaks import attention_peaks
from cases import TOLERANCE, AttentionCase, attention_case, held, scattered, slots_of

KV_LEN = 75


def question(num_rows: int = 9, **options: Any) -> AttentionCase:
    return attention_case([scattered(num_rows, KV_LEN)], [KV_LEN], **{"head_dim": 32, **options})


def reference(case: AttentionCase, params: AttentionParams, kv_len: int) -> torch.Tensor:
    q, positions = case.q.double(), case.meta.positions
    slots = slots_of(case.meta.block_table[0], kv_len, case.cache.k.shape[1])
    k = held(case.cache.k, case.cache.k_scale)[slots].repeat_interleave(q.shape[1] // case.cache.k.shape[2], 1)
    logits = torch.einsum("rhd,nhd->rhn", q, k) * params.scale
    if params.soft_cap is not None:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    apart = torch.arange(kv_len) - positions[:, None]
    hidden = apart > 0
    if params.sliding_window is not None:
        hidden |= apart <= -params.sliding_window
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    if params.sinks is not None:
        logits = torch.cat((logits, params.sinks.double()[:, None].expand(len(q), -1, 1)), -1)
    return torch.softmax(logits, -1)[..., :kv_len].amax((0, 1))


def check(case: AttentionCase, device: torch.device, **of_layer: Any) -> None:
    params = AttentionParams(case.q.shape[-1] ** -0.5, **of_layer)
    kv_len = case.meta.max_kv_len
    want, there = reference(case, params, kv_len), case.to(device)
    before = torch.rand(kv_len, generator=torch.Generator().manual_seed(3)) / 20
    peaks = before.to(device)
    moved = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in of_layer.items()}
    params = AttentionParams(params.scale, **moved)
    attention_peaks(there.q, there.meta.positions, there.cache, there.meta, params, peaks)
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(
        peaks.cpu().double(), torch.maximum(want, before.double()), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    check(question(dtype=dtype, strided=True), device)


def test_more_keys_than_a_tile_has_for_each_split(device: torch.device) -> None:
    case = attention_case([scattered(6, 700)], [700], head_dim=16, heads=(2, 1))
    check(case, device)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_groups(heads: tuple[int, int], contiguous: bool, device: torch.device) -> None:
    check(question(17, heads=heads, contiguous=contiguous), device)


@pytest.mark.parametrize(("head_dim", "block_size"), [(24, 64), (80, 8), (256, 16)])
def test_head_dims_and_blocks(head_dim: int, block_size: int, device: torch.device) -> None:
    check(question(5, head_dim=head_dim, block_size=block_size, dtype=torch.float16), device)


@pytest.mark.parametrize(
    "of_layer",
    [
        {"sliding_window": 7},
        {"soft_cap": 0.5},
        {"sinks": torch.tensor([3.0, -1.0, 0.5, 2.0])},
        {"sliding_window": 20, "sinks": torch.tensor([3.0, -1.0, 0.5, 2.0]), "soft_cap": 30.0},
    ],
    ids=lambda of_layer: ", ".join(of_layer),
)
def test_of_layer(of_layer: dict[str, Any], device: torch.device) -> None:
    check(question(), device, **of_layer)


def test_a_float8_pool(device: torch.device) -> None:
    check(question().in_float8(torch.tensor([0.02, 0.05]), torch.tensor([0.1, 0.2])), device)


def test_a_graphs_further_rows_and_peaks_change_no_bit(device: torch.device) -> None:
    case, found = question().to(device), []
    for more in (0, 20):
        q = torch.cat((case.q, torch.full((more, *case.q.shape[1:]), torch.nan, device=device)))
        positions = torch.cat((case.meta.positions, torch.full((more,), -1, device=device)))
        peaks = torch.zeros(KV_LEN + 3 * more, device=device)
        attention_peaks(q, positions, case.cache, case.meta, AttentionParams(0.2), peaks)
        found.append(peaks.cpu())
    assert torch.equal(found[1][:KV_LEN], found[0])
    assert not found[1][KV_LEN:].any()


def test_several_sequences_are_refused(device: torch.device) -> None:
    case = attention_case([[3], [4]], [4, 5], head_dim=32).to(device)
    with pytest.raises(KernelError, match="2 sequences"):
        attention_peaks(
            case.q, case.meta.positions, case.cache, case.meta, AttentionParams(1.0), torch.zeros(5, device=device)
        )  # fmt: skip
