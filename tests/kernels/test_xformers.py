"""The xformers backend as far as CPU tensors allow: what is handed over, and that it means our attention.

The operators themselves run on a GPU only; `numeric/test_xformers_backend.py` runs decode's Triton kernel in the
interpreter.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cases import assert_close, attention_case, attention_reference, scattered

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("xformers", reason="xformers is not installed")
from cacheblend_kernels import xformers_backend as xb

NOT_HERE = "device=cpu (supported: {'cuda'})"  # the one reason that is left on a CPU


@pytest.fixture(scope="module")
def fmha() -> Any:
    return xb.import_xformers()


def attend(inputs: Any, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """fp64 attention over xformers' own layout [1, rows, kv heads, group, head_dim] under its materialised bias."""
    q, k, v = (t[0].double() for t in (inputs.query, inputs.key, inputs.value))
    logits = torch.einsum("rkgd,nkgd->kgrn", q, k.nan_to_num()) * scale + mask
    out = torch.einsum("kgrn,nkgd->rkgd", torch.softmax(logits, -1), v.nan_to_num())
    return out.flatten(1, 2)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (7, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_inputs_mean_paged_attention(heads: tuple[int, int], head_dim: int, fmha: Any) -> None:
    kv_lens = [70, 5, 200]
    case = attention_case(
        [[n - 1] for n in kv_lens], kv_lens, heads=heads, head_dim=head_dim, block_size=64, dtype=torch.float16
    )
    meta, scale = case.meta, head_dim**-0.5
    bias = xb.paged_bias(fmha, meta.block_table, meta.kv_lens, 256, 64)
    inputs = xb.attention_inputs(fmha, case.q, case.cache, slice(None), bias, scale)
    inputs.validate_inputs()
    assert fmha.triton_splitk.FwOp.not_supported_reasons(inputs) == [NOT_HERE]
    assert inputs.key.data_ptr() == case.cache.k.data_ptr()  # a view of the pool: nothing is copied
    assert bias.k_seqinfo.seqlen is meta.kv_lens  # lengths are read on the device
    bias.k_seqinfo.seqlen_py = kv_lens  # materialize alone reads these
    slots = inputs.key.shape[1]
    mask = bias.materialize((3, meta.block_table.shape[0] * meta.block_table.shape[1] * 64))
    mask = torch.nn.functional.pad(mask, (0, slots - mask.shape[1]), value=-torch.inf)
    assert_close(attend(inputs, mask, scale), attention_reference(case, scale), torch.float16)


@pytest.mark.parametrize("captured", [True, False])
def test_biases_of_captured_graphs_are_kept(captured: bool, fmha: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = xb.XformersBackend.__new__(xb.XformersBackend)
    backend._fmha, backend._bias, backend._captured = fmha, None, []
    monkeypatch.setattr(xb, "capturing", lambda tensor: captured)
    first, second = (attention_case([[9]], [10], block_size=64, dtype=torch.float16) for _ in range(2))
    bias = backend._paged_bias(first.meta, 64)
    assert backend._paged_bias(first.meta, 64) is bias
    starts = weakref.ref(bias.k_seqinfo.seqstart)
    del bias
    backend._paged_bias(second.meta, 64)
    assert (starts() is not None) is captured


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_prefill_inputs_mean_causal_attention(heads: tuple[int, int], head_dim: int, fmha: Any) -> None:
    case = attention_case(
        [list(range(70))], [70], heads=heads, head_dim=head_dim, block_size=64, dtype=torch.float16, contiguous=True,
        strided=True,
    )  # fmt: skip
    scale = head_dim**-0.5
    first, causal = case.meta.contiguous_slot, fmha.attn_bias.LowerTriangularMask()
    inputs = xb.attention_inputs(fmha, case.q, case.cache, slice(first, first + 70), causal, scale)
    inputs.validate_inputs()
    for op in (fmha.flash3, fmha.flash, fmha.cutlass):
        reasons = [r for r in op.FwOp.not_supported_reasons(inputs) if "wasn't built" not in r]
        assert reasons == [NOT_HERE]
    mask = inputs.attn_bias.materialize((70, 70))
    assert_close(attend(inputs, mask, scale), attention_reference(case, scale), torch.float16)


def test_full_prefill_is_told_from_all_others() -> None:
    def case(positions: list[int], kv_len: int, contiguous: bool = True, **options: Any) -> Any:
        return attention_case([positions], [kv_len], contiguous=contiguous, **{"dtype": torch.float16, **options})

    def full(c: Any) -> bool:
        return xb.is_full(c.q, c.cache, c.meta)

    assert full(case(list(range(30)), 30))
    assert not full(case(scattered(9, 30), 30))
    assert not full(case(list(range(20, 30)), 30))  # a suffix
    assert not full(case(list(range(20)), 30))
    assert not full(case(list(range(30)), 30, contiguous=False))
    assert not full(case(list(range(30)), 30, dtype=torch.float32))
    held = case(list(range(30)), 30)
    assert not full(held.in_float8(torch.ones(2), torch.ones(2)))


def test_decode_shapes_the_operator_has_no_kernel_for() -> None:
    def takes(block_size: int = 64, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> bool:
        case = attention_case([[9]], [10], block_size=block_size, head_dim=head_dim, dtype=dtype)
        return xb.takes_decode(case.q, case.cache)

    assert takes()
    assert takes(block_size=128, head_dim=64, dtype=torch.float16)
    assert not takes(block_size=16)
    assert not takes(head_dim=80)
    assert not takes(dtype=torch.float32)
