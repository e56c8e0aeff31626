"""Products with a model's weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cacheblend_kernels import RowTable, compiled
from cacheblend_kernels.torch_attention import onednn_multiplies
from checkpoints import write_checkpoint

from cacheblend_cli.model.linear import CACHES, Embedding, Linear, MappedLinear, bound_caches, decoding, linear

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
@pytest.mark.parametrize("decodes", [False, True])
def test_a_product_in_place_is_the_plain_one(
    dtype: torch.dtype, stored: torch.dtype, bias: bool, rows: int, decodes: bool
) -> None:
    if not compiled.multiplies(dtype):
        pytest.skip("no code was compiled")
    generator = torch.Generator().manual_seed(rows)
    weight, x = (
        torch.randn(50, 96, generator=generator).to(stored),
        torch.randn(rows, 96, generator=generator).to(dtype),
    )
    b = torch.randn(50, generator=generator).to(dtype) if bias else None
    own, plain = linear(RowTable.of(weight), b), linear(weight.to(dtype), b)
    assert isinstance(own, MappedLinear)
    assert isinstance(plain, Linear)
    with decoding(decodes):
        out = own(x)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), plain(x).float(), atol=1e-4 if dtype == torch.float32 else 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 64), (50, 640), (64, 1024), (64, 2624), (192, 96)])
@pytest.mark.parametrize("decodes", [False, True])
def test_a_row_is_the_same_alone_and_among_others_to_the_bit(
    shape: tuple[int, int], dtype: torch.dtype, decodes: bool
) -> None:
    if not compiled.multiplies(dtype):
        pytest.skip("no code was compiled")
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, shape[1], generator=generator).to(dtype) for n in (shape[0], 70))
    product = linear(RowTable.of(weight), torch.randn(shape[0], generator=generator).to(dtype))
    with decoding(decodes):
        whole = product(x)
        for count in (1, 2, 3, 4, 17, 33):
            assert torch.equal(product(x[-count:]), whole[-count:])


@pytest.mark.parametrize("columns", [None, slice(32, 64)])
def test_an_embedding_in_place_is_the_plain_one(columns: slice | None) -> None:
    weight, ids = torch.randn(40, 96).to(torch.bfloat16), torch.tensor([0, 39, 7, 7])
    plain = Embedding(weight)(ids, torch.float32, columns)
    assert torch.equal(plain, weight[ids].float()[:, columns or slice(None)])
    if compiled.multiplies(torch.float32):
        assert torch.equal(Embedding(RowTable.of(weight))(ids, torch.float32, columns), plain)


def test_the_users_own_capacity_wins() -> None:
    for name in (*CACHES, "DNNL_PRIMITIVE_CACHE_CAPACITY"):
        environment = {name: "7"}
        bound_caches(environment)
        assert (
            environment == CACHES | {name: "7"}
            if name in CACHES
            else "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in environment
        )


@pytest.mark.skipif(not onednn_multiplies(torch.bfloat16), reason="oneDNN has no products in bfloat16 here")
def test_a_process_keeps_so_many_products_at_most(tmp_path: Path) -> None:
    """The bound holds although torch is imported before a model is loaded: the product made first is made again at the
    end."""
    write_checkpoint(tmp_path / "m", "llama-gqa")
    code = f"""
import torch
from pathlib import Path
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.loading import load_model
load_model(Path({str(tmp_path / "m")!r}), "m", torch.device("cpu"), Precision("float32"), "torch")
from cacheblend_cli.model.linear import Linear
product = Linear(torch.ones(64, 64, dtype=torch.bfloat16))
with torch.backends.mkldnn.verbose(2):
    for rows in (*range(5, 5 + 129), 5):  # fewer are not oneDNN's everywhere
        product(torch.ones(rows, 64, dtype=torch.bfloat16))
"""
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "documents", ROOT / "store", ROOT / "kernels")))
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    made = [line.split(",")[3] for line in told.splitlines() if ",create:" in line and "matmul" in line]
    assert made == ["create:cache_miss"] * 130
