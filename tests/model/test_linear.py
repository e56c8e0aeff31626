"""Packed weights give what plain ones give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from cacheblend_cli.model.linear import Linear, can_pack
from cacheblend_cli.model.loading import Precision, load_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(48, 40, generator=generator), torch.randn(rows, 40, generator=generator)
    b = torch.randn(48, generator=generator) if bias else None
    cast = [None if t is None else t.to(dtype) for t in (weight, b, x)]
    own = Linear(cast[0], cast[1])  # type: ignore[arg-type]
    exact = cast[2].double() @ cast[0].double().T + (0 if cast[1] is None else cast[1].double())  # type: ignore[union-attr]
    out = own(cast[2])  # type: ignore[arg-type]
    assert out.dtype == dtype
    assert out.shape == (rows, 48)
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}[dtype]
    assert rows == 0 or (out.double() - exact).abs().max() <= tolerance
    assert own.packed == (can_pack(cast[0]) and dtype != torch.float16)  # type: ignore[arg-type]
    assert own.num_bytes == dtype.itemsize * (48 * 40 + (48 if bias else 0))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_stays_in_its_file(tmp_path: Path, stored: torch.dtype, tied: bool) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa", tie_word_embeddings=tied)
    file = tmp_path / "m" / "model.safetensors"
    tensors = {name: t.to(stored) for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    decoder = load_model(tmp_path / "m", "m", torch.device("cpu"), Precision("float32"), "torch").decoder
    embedding, ids = tensors["model.embed_tokens.weight"], torch.tensor([3, 0, 7])
    assert decoder.embedding.dtype == stored
    assert torch.equal(decoder.embed(ids), embedding[ids].float())
    assert decoder.dtype == torch.float32
    assert str(file) in Path("/proc/self/maps").read_text()
    row = torch.randn(1, embedding.shape[1])
    head = tensors.get("lm_head.weight", embedding).float()
    assert torch.allclose(decoder._head(row), row @ head.T, atol=1e-4)
    assert decoder._head.packed == can_pack(head)
