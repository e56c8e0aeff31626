"""Packed weights give what plain ones give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cacheblend_kernels import compiled
from cacheblend_kernels.torch_backend import TorchBackend
from checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from cacheblend_cli.model import linear as linear_module
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.linear import CACHES, STEADY_ROWS, Int8Linear, Linear, bound_caches, can_pack, may_give_rows
from cacheblend_cli.model.loading import Precision, load_model
from cacheblend_cli.model.weights import IN_FILE, load_weights

ROOT = Path(__file__).parents[2]
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this CPU has no VNNI")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 64), (64, 640), (64, 1024), (64, 2624), (192, 96)])
@pytest.mark.parametrize("kind", [Linear, pytest.param(Int8Linear, marks=needs_vnni)])
def test_few_rows_are_the_same_as_many_to_the_bit(
    kind: type[Linear | Int8Linear], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    product = kind(torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[0]).to(dtype))
    x = torch.randn(70, shape[1], generator=generator).to(dtype)
    whole = product(x)
    assert torch.equal(product(x[:STEADY_ROWS]), whole[:STEADY_ROWS])
    if shape[1] % 64 == 0:
        assert product.is_steady == kind(torch.randn(64, 64).to(dtype)).is_steady
    if product.is_steady:  # on a CPU for which it is compiled, with sums as oneDNN makes them
        for count in range(1, STEADY_ROWS):
            assert torch.equal(product(x[-count:]), whole[-count:])


def test_a_product_is_compiled_only_where_it_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Linear(torch.randn(64, 64))
    plain = own._multiplied(torch.ones(1, 64), None)
    monkeypatch.setattr(linear_module, "_ALIKE", {})
    product = compiled.product

    def other(x: torch.Tensor, addresses: tuple[int, int, int], shape: tuple[int, int]) -> torch.Tensor | None:
        out = product(x, addresses, shape)
        return None if out is None else out.mul_(1 + 2**-22)

    monkeypatch.setattr(compiled, "product", other)
    assert not own.is_steady
    assert torch.equal(own(torch.ones(1, 64)), plain)
    zeros = Linear(torch.zeros(64, 64))  # alike in any layout, so they tell nothing of it
    monkeypatch.setattr(compiled, "product", product)
    monkeypatch.setattr(linear_module, "_ALIKE", {})
    assert not zeros.is_steady


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


def test_the_users_own_capacity_wins() -> None:
    for name in (*CACHES, "DNNL_PRIMITIVE_CACHE_CAPACITY"):
        environment = {name: "7"}
        bound_caches(environment)
        assert (
            environment == CACHES | {name: "7"}
            if name in CACHES
            else "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in environment
        )


def test_a_process_keeps_so_many_products_at_most(tmp_path: Path) -> None:
    """The bound holds although torch is imported before a model is loaded: the product made first is made again at the
    end."""
    write_checkpoint(tmp_path / "m", "llama-gqa")
    code = f"""
import torch
from pathlib import Path
from cacheblend_cli.model.loading import Precision, load_model
load_model(Path({str(tmp_path / "m")!r}), "m", torch.device("cpu"), Precision("float32"), "torch")
from cacheblend_cli.model.linear import Linear
product = Linear(torch.ones(8, 8))
with torch.backends.mkldnn.verbose(2):
    for rows in (*range(5, 5 + 128), 5):  # fewer are not oneDNN's everywhere
        product(torch.ones(rows, 8))
"""
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "store", ROOT / "kernels")))
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    made = [line.split(",")[3] for line in told.splitlines() if ",create:" in line and "inner_product" in line]
    assert made == ["create:cache_miss"] * 129


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(192, 128).to(dtype)
    product = Linear(weight)
    if not product.gives_rows:
        pytest.skip("no code was compiled for this layout")
    ids = torch.tensor([0, 191, 64, 63, 64])
    assert torch.equal(product.rows(ids), weight[ids])
    assert product.rows(ids[:0]).shape == (0, 128)


@pytest.mark.parametrize(("weight_dtype", "vocab_size"), [("auto", 320), ("plain", 320), ("auto", 310)])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_tied_head_in_memory_is_held_once(
    weight_dtype: str, vocab_size: int, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_cli.model.decoder.SMALL_HEAD", small)
    write_checkpoint(tmp_path / "m", "llama-mha-tied-bias", vocab_size=vocab_size)
    spec = load_model(tmp_path / "m", "m", torch.device("cpu"), Precision("float32"), "torch").decoder.spec
    weights = load_weights(spec, tmp_path / "m", torch.float32, torch.device("cpu"))
    weights["embed"] = weights["lm_head"] = weights.pop(IN_FILE).float()  # as of a GGUF file, which is unpacked
    embedding = weights["embed"].clone()
    decoder = Decoder(spec, weights, TorchBackend(), weight_dtype)
    assert torch.equal(decoder.embed(torch.arange(vocab_size)), embedding)
    h = torch.randn(5, embedding.shape[1])
    assert torch.allclose(decoder._head(h), h @ embedding.T, atol=1e-4)
    assert not set(weights) & {"embed", "lm_head"}
    held_by_head = weight_dtype == "auto" and may_give_rows(embedding)
    assert (decoder.embedding is None) == held_by_head
    assert decoder._head.packed == (weight_dtype == "auto" and can_pack(embedding) and (held_by_head or small > 0))
