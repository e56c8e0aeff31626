"""Codecs: how far a value may be from what was stored, whatever the shape; and what no codec may swallow."""

from __future__ import annotations

import pytest
import torch
from cacheblend_store import CodecError
from cacheblend_store.format.blobs import GROUP, PLAIN
from cacheblend_store.format.codecs import CODECS, decode_kv, encode_kv, is_lossless
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

HALF_STEP = {
    "float32": 0.0,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}  # of a value
SPACING = {"float8_e4m3": 448 * 2.0**9, "float8_e5m2": 57344 * 2.0**16}  # the largest number by the smallest
LEVELS = {"int8": 255, "int4": 15}


def round_trip(k: Tensor, v: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    return decode_kv(load(encode_kv(k, v, codec)), codec)  # safetensors reads what is written here


def bounds(k: Tensor, v: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """The error each value of K and V may have, in fp64."""
    if codec in LEVELS:  # half a level of the group: GROUP tokens of one channel for K, one token of one head for V
        groups = k.double().split(GROUP)
        ranges = [(g.amax(0) - g.amin(0)).expand(g.shape) for g in groups]
        of_token = (v.double().amax(2) - v.double().amin(2))[..., None].expand(v.shape)
        return torch.cat(ranges) / LEVELS[codec] / 2, of_token / LEVELS[codec] / 2
    smallest = {"float16": 2.0**-25, "bfloat16": 1e-40}.get(codec, 0.0)
    found = []
    for x in (k.double(), v.double()):
        if codec in SPACING:  # below its smallest normal number, even steps of the head's scale
            smallest_of_head = x.abs().amax(dim=(0, 2)) / SPACING[codec] / 2
            found.append(torch.maximum(x.abs() * HALF_STEP[codec], smallest_of_head[None, :, None]))
        else:
            found.append(x.abs() * HALF_STEP[codec] + smallest)
    return found[0], found[1]


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    num_tokens=st.integers(1, 3 * GROUP + 1),
    heads=st.integers(1, 3),
    dim=st.sampled_from([2, 8, 64]),
    exponent=st.integers(-12, 4),
    offset=st.sampled_from([0.0, 0.5, -100.0]),
    seed=st.integers(0, 2**32),
)
def test_errors_stay_within_half_a_step(
    codec: str, num_tokens: int, heads: int, dim: int, exponent: int, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, heads, dim, generator=generator) * 2.0**exponent + offset
    k[:, :, ::2] *= 8  # channels of their own size, as keys have them
    for x, back, bound in zip((k, v), round_trip(k, v, codec), bounds(k, v, codec), strict=True):
        error, rounding = (x.double() - back.double()).abs(), x.abs().max().double() * 2.0**-21 + 1e-12
        assert bool((error <= bound + rounding).all()), (codec, float((error - bound).max()))
        if codec == "float32":
            assert torch.equal(x, back)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_tokens", [1, GROUP - 1, GROUP, GROUP + 1])
def test_zero_and_constant_values_come_back_exactly(codec: str, num_tokens: int) -> None:
    zero = torch.zeros(num_tokens, 2, 8)
    assert all(torch.equal(back, zero) for back in round_trip(zero, zero, codec))
    k, v = torch.full_like(zero, 0.75), zero.clone()
    k[-1] = 0  # a row of zeros among others
    k_back, v_back = round_trip(k, v, codec)
    assert not k_back[-1].any()
    assert not v_back.any()
    if "int" in codec:
        constant = torch.full_like(zero, 0.3)
        assert all(torch.equal(back, constant) for back in round_trip(constant, constant, codec))


def test_only_a_dtype_that_holds_every_value_is_lossless() -> None:
    assert [codec for codec in CODECS if is_lossless(codec, torch.float32)] == ["float32"]


def test_an_outlier_costs_its_own_group_alone() -> None:
    """KIVI's reason: K has channels of outliers, V has tokens of them."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 2 * GROUP, 1, 8)
    k[3, 0, 5], v[7, 0, 2] = 1e4, 1e4
    k_error, v_error = ((x - back).abs() for x, back in zip((k, v), round_trip(k, v, "int4"), strict=True))
    elsewhere = torch.ones(2 * GROUP, 8, dtype=torch.bool)
    elsewhere[:GROUP, 5] = False
    assert k_error[:, 0][elsewhere].max() < 0.25
    assert v_error[[i for i in range(2 * GROUP) if i != 7]].max() < 0.25
    assert k_error[:GROUP, 0, 5].max() > 0.25


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_is_kept_or_refused_and_spreads_nowhere(codec: str, bad: float, where: str) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 5, 2, 8)
    (k if where == "k" else v)[2, 1, 3] = bad
    if codec not in PLAIN:
        with pytest.raises(CodecError, match="finite") as caught:
            encode_kv(k, v, codec)
        assert caught.value.hint
        return
    for x, back in zip((k, v), round_trip(k, v, codec), strict=True):
        assert torch.equal(x.isfinite(), back.isfinite())
        assert torch.equal(x.isnan(), back.isnan())


def test_values_beyond_a_codecs_range_are_refused() -> None:
    k = torch.full((3, 2, 8), 70_000.0)
    with pytest.raises(CodecError, match=r"7e\+04.*float16"):
        encode_kv(k, k, "float16")
    assert torch.equal(round_trip(k, k, "float32")[0], k)
    huge = torch.tensor([-3e38, 3e38]).repeat(4).expand(3, 2, 8)
    for codec in ("int8", "int4"):
        with pytest.raises(CodecError):
            encode_kv(huge, huge, codec)
