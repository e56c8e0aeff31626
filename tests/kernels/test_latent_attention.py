"""Attention over latents beside K and V made of them, in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cacheblend_kernels import AttentionParams, KernelBackend, KernelError, LatentHeads, LayerCache
from cacheblend_kernels.torch_backend import TorchBackend
from cases import AttentionCase, assert_close, attention_case, attention_reference, scattered
from torch import Tensor

HEADS, NOPE, ROPE, RANK, VALUE = 10, 12, 8, 16, 20
SCALE = 0.2
FEW, MANY = 5, 150  # rows, on either side of where the expanded form takes fewer products


def latent_case(positions: list[list[int]], kv_lens: list[int], **kinds: object) -> tuple[AttentionCase, LatentHeads]:
    """q, a pool of position keys and latents, and the up-projections."""
    case = attention_case(positions, kv_lens, heads=(HEADS, 1), head_dim=RANK, **kinds)  # type: ignore[arg-type]
    q = torch.randn(len(case.q), HEADS, NOPE + ROPE).to(case.q.dtype)
    heads = (torch.randn(HEADS, dim, RANK).div(4).to(q.dtype) for dim in (NOPE, VALUE))
    cache = LayerCache(case.cache.k[..., :ROPE].contiguous(), case.cache.v)
    return replace(case, q=q, cache=cache), LatentHeads(*heads)


def expected(case: AttentionCase, heads: LatentHeads, latents: Tensor, k: Tensor) -> Tensor:
    """Every head's K and V written out, in a pool that the reference of other attention takes."""
    made_k = torch.einsum("bsr,hdr->bshd", latents.double(), heads.keys.double())
    made_v = torch.einsum("bsr,hdr->bshd", latents.double(), heads.values.double())
    whole_k = torch.cat((made_k, k.double().expand(*made_k.shape[:3], -1)), -1)
    wide = torch.cat((made_v, torch.zeros(*made_v.shape[:3], NOPE + ROPE - VALUE).double()), -1)
    return attention_reference(replace(case, cache=LayerCache(whole_k, wide)), SCALE)[..., :VALUE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("num_rows", [1, FEW, MANY])
def test_it_is_attention_over_what_is_made_of_the_latents(num_rows: int, contiguous: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case, heads = latent_case([scattered(num_rows, 300), [2, 7], [3]], [300, 8, 4], contiguous=contiguous, dtype=dtype)
    out = TorchBackend().latent_attention(case.q, case.cache, case.meta, AttentionParams(SCALE), heads)
    assert out.dtype == dtype
    assert_close(out, expected(case, heads, case.cache.v[:, :, 0], case.cache.k), dtype)


def test_over_a_float8_pool() -> None:
    torch.manual_seed(0)
    case, heads = latent_case([scattered(FEW, 60)], [60])
    held = case.in_float8(torch.tensor([0.02]), torch.tensor([0.03]))
    out = TorchBackend().latent_attention(held.q, held.cache, held.meta, AttentionParams(SCALE), heads)
    wide = (p.float() * s for p, s in ((held.cache.k, 0.02), (held.cache.v, 0.03)))
    k, latents = wide
    assert_close(out, expected(case, heads, latents[:, :, 0], k), torch.float32)


def test_rows_that_only_fill_up_see_nothing() -> None:
    case, heads = latent_case([[4], [6]], [5, 7])
    filled = replace(case, q=torch.cat((case.q, torch.ones(2, HEADS, NOPE + ROPE))))
    out = TorchBackend().latent_attention(filled.q, filled.cache, filled.meta, AttentionParams(SCALE), heads)
    alone = TorchBackend().latent_attention(case.q, case.cache, case.meta, AttentionParams(SCALE), heads)
    assert torch.equal(out[:2], alone)
    assert not out[2:].any()


def test_a_backend_without_it_says_so() -> None:
    case, heads = latent_case([[4]], [5])
    backend = TorchBackend()
    with pytest.raises(KernelError) as refused:
        KernelBackend.latent_attention(backend, case.q, case.cache, case.meta, AttentionParams(SCALE), heads)
    assert refused.value.hint
