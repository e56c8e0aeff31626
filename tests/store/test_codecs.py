"""Codecs: error bounds for any shape, and values that codecs must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cacheblend_store import BadBlob, CodecError
from cacheblend_store.format.blobs import CODECS, PLAIN, blob_size, blob_spec
from cacheblend_store.format.codecs import (
    check_finite,
    coded,
    coded_unchecked,
    encode_kv,
    is_lossless,
    rotated,
)
from cacheblend_store.format.levels import BITS, bits_of, levels_of
from cacheblend_store.writer import with_digests
from decoded import decode_kv
from hypothesis import given, settings
from hypothesis import strategies as st
from one_blob import read_layer
from safetensors.torch import load
from small_chunks import make_chunk
from torch import Tensor

HALF_STEP = {
    "float32": 0.0,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3": 2.0**-4,
}  # of a value
SPACING = {"float8_e4m3": 448 * 2.0**9}  # the largest number by the smallest
ERROR_OF_BITS = {
    7: 0.0128,
    6: 0.0255,
    5: 0.05,
    4: 0.097,
    3: 0.187,
}  # of a row of normally distributed values, to its size
FEW_BITS = ("int7", "int4")
ERRORS = {codec: tuple(ERROR_OF_BITS[bits] for bits in BITS[codec]) for codec in FEW_BITS}


def round_trip(k: Tensor, v: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    return decode_kv(
        load(encode_kv(k, v, codec)), codec, k.shape[-1], v.shape[-1]
    )  # safetensors reads what is written here


def bounds(k: Tensor, v: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """The error each value of K and V may have, in fp64."""
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
    codec=st.sampled_from([codec for codec in CODECS if codec not in FEW_BITS]),
    num_tokens=st.integers(1, 97),
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


def relative(x: Tensor, back: Tensor, zero: Tensor | float = 0.0) -> Tensor:
    """Each row's error by the size of the row's distance from `zero`."""
    return (x - back).double().norm(dim=-1) / (x - zero).double().norm(dim=-1)


@pytest.mark.parametrize("codec", FEW_BITS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (20, 20), (64, 512), (256, 256), (16, 33)])
def test_an_error_of_few_bits_is_a_normal_distributions(codec: str, dims: tuple[int, int]) -> None:
    """Whatever the size of heads (80 and 96 are no powers of two, MLA's latents are wider than its position keys), the
    bias of K's channels and the size of tokens."""
    torch.manual_seed(0)
    k, v = (torch.randn(300, 2, dim) for dim in dims)
    sizes = 2.0 ** torch.randint(-6, 7, (300, 1, 1))
    bias = torch.randn(2, dims[0]) * 100  # as Qwen2's
    k_back, v_back = round_trip(k + bias, v * sizes, codec)
    found = relative(k + bias, k_back, (k + bias).mean(0)), relative(v * sizes, v_back)
    usual_errors = [ERROR_OF_BITS[bits] for bits in bits_of(codec, *dims)]
    for errors, usual in zip(found, usual_errors, strict=True):
        assert errors.square().mean().sqrt() < 1.1 * usual
        assert errors.max() < 4 * usual


@pytest.mark.parametrize("codec", FEW_BITS)
def test_channels_and_tokens_of_their_own_size_cost_no_others(codec: str) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 256, 2, 64)
    k[:, :, 7] *= 30
    v[5], v[:, 1, 9] = v[5] * 1e4, v[:, 1, 9] * 30
    k_error, v_error = ERRORS[codec]
    k_back, v_back = round_trip(k, v, codec)
    assert relative(k, k_back, k.mean(0)).max() < 4 * k_error
    assert relative(v, v_back).max() < 4 * v_error
    k[3] *= 1000  # a token that draws attention: it moves the mean, no more
    k_back, _ = round_trip(k, v, codec)
    assert relative(k, k_back, k.mean(0)).max() < 4 * k_error


@pytest.mark.parametrize("codec", FEW_BITS)
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_equal_tokens_and_a_single_one_are_their_mean(codec: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 2, 64)
    k = row.expand(num_tokens, 2, 64)
    back, _ = round_trip(k, k, codec)
    assert float((k - back).abs().max()) <= 2.0**-8 * float(row.abs().max())
    zero = torch.zeros(num_tokens, 2, 64)
    assert all(torch.equal(x, zero) for x in round_trip(zero, zero, codec))
    assert all(
        torch.equal(x, row.bfloat16().expand(num_tokens, 2, 64)) for x in round_trip(k.bfloat16(), zero, codec)[:1]
    )


@pytest.mark.parametrize("codec", FEW_BITS)
def test_what_fits_no_level_is_scaled_by_its_largest_value(codec: str) -> None:
    """A row of one direction of the rotation: after it, all is in one channel."""
    v = torch.ones(4, 1, 64) * torch.tensor([1.0, -3.0, 1e-3, 0.0])[:, None, None]
    v[3] = torch.randn(64)
    _, back = round_trip(v, v, codec)
    levels = levels_of(BITS[codec][1])
    least = min(abs(level) for level in levels) / levels[-1]
    assert float(relative(v, back)[:3].max()) <= least * 64**0.5 + 0.01
    assert float(relative(v, back)[3]) < 2 * ERRORS[codec][1]


@pytest.mark.parametrize("dim", [2, 6, 64, 80, 96, 20, 256])
def test_the_rotation_is_its_own_inverse_and_spreads_a_channel(dim: int) -> None:
    one = torch.eye(dim)
    turned = rotated(one)
    torch.testing.assert_close(rotated(turned), one, atol=1e-6, rtol=0)
    torch.testing.assert_close(turned @ turned.T, one, atol=1e-6, rtol=0)
    mixed = 2 * (dim // 2 & -(dim // 2))
    assert int((turned.abs() > 0).sum(0).unique()) == mixed
    assert mixed == {80: 16, 96: 32, 6: 2, 20: 4}.get(dim, dim)


def test_levels_are_those_of_lloyd_and_max() -> None:
    """J. Max, Quantizing for Minimum Distortion (1960), table I."""
    assert levels_of(3)[4:] == pytest.approx((0.2451, 0.7560, 1.344, 2.152), abs=5e-4)
    assert levels_of(4)[8:] == pytest.approx((0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733), abs=5e-4)
    for bits in ERROR_OF_BITS:
        levels = levels_of(bits)
        assert list(levels) == sorted(levels)
        assert list(levels) == [-level for level in reversed(levels)]


@pytest.mark.parametrize("codec", FEW_BITS)
def test_latents_have_the_bits_of_their_keys(codec: str) -> None:
    """Latents (MLA) are multiplied as keys, too; their position keys are few."""
    assert len(set(bits_of(codec, 64, 512))) == 1
    assert 0 <= sum(bits_of(codec, 64, 512)) - sum(bits_of(codec, 64)) <= 1


@pytest.mark.parametrize(("codec", "most"), [("int7", 6.8), ("int4", 4.3)])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (8, 128)])
def test_bits_a_value(codec: str, most: float, heads: int, dim: int) -> None:
    size = blob_size(blob_spec(codec, 512, heads, dim))
    assert size == len(encode_kv(*torch.randn(2, 512, heads, dim), codec))
    assert 8 * size / (2 * 512 * heads * dim) <= most


def test_only_a_dtype_that_holds_every_value_is_lossless() -> None:
    assert [codec for codec in CODECS if is_lossless(codec, torch.float32)] == ["float32"]


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
    huge = torch.tensor([-3e38, 3e38]).repeat(4).expand(3, 2, 8)
    for codec in FEW_BITS:
        for k, v in ((huge, torch.zeros(3, 2, 8)), (torch.zeros(3, 2, 8), huge * torch.ones(1))):
            with pytest.raises(CodecError, match="too large"):
                encode_kv(k * torch.tensor([1.0, -1.0, 1.0])[:, None, None], v, codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (20, 33)])
def test_layers_encoded_together_are_those_encoded_alone(codec: str, dims: tuple[int, int]) -> None:
    """As on a GPU: several layers at once, no flag read before the end."""
    torch.manual_seed(0)
    k, v = (torch.randn(4, 50, 2, dim).bfloat16() for dim in dims)
    k[1, :, :, 7] *= 30
    k[2, 3] *= 1000
    v[0, 5], v[1, 6], v[2] = 3.0, 0.0, 0.0  # rows that a wider scale suits, and empty ones
    tensors, is_finite = coded_unchecked(k, v, codec)
    assert is_finite.tolist() == [[True, True]] * 4
    for layer in range(4):
        alone = coded(k[layer], v[layer], codec)
        assert alone.keys() == tensors.keys()
        for name, tensor in alone.items():
            assert torch.equal(tensors[name][layer].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_flag_names_the_layer_that_does_not_fit(codec: str, bad: float) -> None:
    """And the other layers are what they are without it."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 20, 2, 8)
    good, _ = coded_unchecked(k, v, codec)
    v[1, 4, 0, :2] = bad
    tensors, is_finite = coded_unchecked(k, v, codec)
    refusals = [
        _refusal(lambda: coded(k[1], v[1], codec)),
        _refusal(lambda: check_finite(is_finite, codec)),
    ]
    assert refusals[0] == refusals[1]
    assert is_finite.logical_not().flatten().nonzero().flatten().tolist() == ([3] if refusals[0] else [])
    for name, tensor in tensors.items():
        assert torch.equal(tensor[::2].view(torch.uint8), good[name][::2].view(torch.uint8))


def _refusal(call: Callable[[], object]) -> tuple[str, str | None] | None:
    try:
        call()
    except CodecError as error:
        return error.message, error.hint
    return None


@pytest.mark.parametrize("codec", FEW_BITS)
def test_a_flipped_bit_anywhere_is_found(codec: str) -> None:
    """In codes, scales and means, and in the header."""
    torch.manual_seed(0)
    blob = bytearray(encode_kv(*torch.randn(2, 5, 2, 8), codec))
    manifest = replace(
        make_chunk(1)[0], token_ids=tuple(range(5)), codec=codec, num_layers=1, num_kv_heads=2, head_dim=8
    )
    whole = with_digests(manifest, [bytes(blob)])
    assert set(read_layer(bytes(blob), whole)) == {"k", "v", "k_scale", "v_scale", "k_mean"}
    for at in range(len(blob)):
        blob[at] ^= 1 << at % 8
        with pytest.raises(BadBlob):
            read_layer(bytes(blob), whole)
        blob[at] ^= 1 << at % 8
