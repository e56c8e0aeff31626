"""The torch backend's attention against fp64, in the cases that SDPA has no argument for."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels import AttentionParams, torch_attention
from cacheblend_kernels.torch_attention import KEY_STEP, TILE_ROWS, onednn_multiplies
from cacheblend_kernels.torch_backend import TorchBackend
from cases import assert_close, attention_case, attention_reference, scattered

SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0])
CASES = [(None, None, SINKS), (20, None, SINKS), (None, 5.0, SINKS), (20, 5.0, None)]


@pytest.fixture
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of prompts by torch's operations."""
    monkeypatch.setattr(torch_attention.compiled, "prefill_attention", lambda *_: None)


@pytest.mark.parametrize(("window", "cap", "sinks"), CASES)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.usefixtures("in_tiles")
def test_prefill(window: int | None, cap: float | None, sinks: torch.Tensor | None, every: bool) -> None:
    positions = list(range(90)) if every else scattered(75, 90)
    case = attention_case([positions], [90], heads=(4, 2), head_dim=32, contiguous=True)
    out = TorchBackend().prefill_attention(case.q, case.cache, case.meta, AttentionParams(0.2, window, cap, sinks))
    assert_close(out, attention_reference(case, 0.2, window, cap, sinks), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "cap", "sinks"), [(None, None, None), (300, None, None), *CASES])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.usefixtures("in_tiles")
def test_prefill_in_tiles(
    window: int | None, cap: float | None, sinks: torch.Tensor | None, every: bool, dtype: torch.dtype
) -> None:
    """Of several tiles each, over several steps of keys; with a window the later ones do not begin at the first key."""
    num_keys = 3 * KEY_STEP - 8
    positions = list(range(num_keys)) if every else scattered(2 * TILE_ROWS + 9, num_keys)
    case = attention_case([positions], [num_keys], head_dim=16, dtype=dtype)
    out = TorchBackend().prefill_attention(case.q, case.cache, case.meta, AttentionParams(0.2, window, cap, sinks))
    assert_close(out, attention_reference(case, 0.2, window, cap, sinks), dtype)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("most", [1, 2000, 40000])
@pytest.mark.usefixtures("in_tiles")
def test_a_product_over_many_keys_has_few_rows(
    window: int | None, most: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tiles grow narrower as their keys grow, down to a row; each row is in one of them."""
    monkeypatch.setattr(torch_attention, "LOGITS", most)
    num_keys = 3 * KEY_STEP - 8
    case = attention_case([scattered(150, num_keys)], [num_keys], head_dim=16)
    seen = list[tuple[int, int]]()
    product = torch_attention._product

    def counted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape[0], w.shape[0]))
        return product(x, w)

    monkeypatch.setattr(torch_attention, "_product", counted)
    out = TorchBackend().prefill_attention(case.q, case.cache, case.meta, AttentionParams(0.2, window))
    assert_close(out, attention_reference(case, 0.2, window, None, None), torch.float32)
    group = case.q.shape[1] // case.cache.k.shape[2]
    assert seen
    assert all(rows == group or rows * (keys - KEY_STEP) <= most for rows, keys in seen[::2])


@pytest.mark.parametrize(("window", "cap", "sinks"), CASES)
def test_decode(window: int | None, cap: float | None, sinks: torch.Tensor | None) -> None:
    kv_lens = [90, 3, 1]
    case = attention_case([[n - 1] for n in kv_lens], kv_lens, heads=(4, 2), head_dim=32)
    out = TorchBackend().decode_attention(case.q, case.cache, case.meta, AttentionParams(0.2, window, cap, sinks))
    assert_close(out, attention_reference(case, 0.2, window, cap, sinks), torch.float32)


@pytest.mark.parametrize("window", [None, 100])
def test_prefill_in_16_bits_over_the_pool(window: int | None) -> None:
    """Compiled where the CPU has the instructions, else in tiles."""
    positions = [*range(3, 40, 2), *range(200, 500)]
    case = attention_case([positions, [4, 9]], [500, 10], heads=(6, 2), head_dim=32, dtype=torch.bfloat16)
    out = TorchBackend().prefill_attention(case.q, case.cache, case.meta, AttentionParams(0.2, window))
    assert_close(out, attention_reference(case, 0.2, window), torch.bfloat16)


def test_whether_onednn_multiplies_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert onednn_multiplies(torch.float32) == torch.backends.mkldnn.is_available()
    assert not onednn_multiplies(torch.float16)

    def refused(*_: object) -> None:  # as without AVX-512, in bfloat16
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refused)
    assert not onednn_multiplies.__wrapped__(torch.float32)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_decoding_in_16_bits_makes_no_product_for_every_length(
    cap: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """oneDNN compiles one for a shape, and keeps it: an answer's every step has another number of keys."""
    case = attention_case([[89]], [90], heads=(4, 2), head_dim=32, dtype=torch.bfloat16)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        out = TorchBackend().decode_attention(case.q, case.cache, case.meta, AttentionParams(0.2, None, cap))
    assert "matmul" not in capfd.readouterr().out
    assert_close(out, attention_reference(case, 0.2, None, cap, None), torch.bfloat16)
