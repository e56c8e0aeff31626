"""A GPU's pool: stored KV of several layers is written by one launch, and by none to another layer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cacheblend_kernels import Slots
from cacheblend_kernels.torch_backend import TorchBackend
from cacheblend_kernels.triton_backend.backend import TritonBackend
from fake_gpu import compute_with_torch, installed, watch_launches
from fake_gpu.tensors import unwrapped
from kernel_references import stored_chunks, stored_layers

from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.kv_scales import KVScales

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPES = ((3, 64), (2, 32), (3, 64), (2, 32), (3, 64))
SPEC = SimpleNamespace(
    kv_shapes=SHAPES, num_layers=len(SHAPES), num_kv_layers=len(SHAPES), kv_layer=lambda layer: layer
)


@pytest.mark.parametrize("codec", ["bf16", "int7"])
@pytest.mark.parametrize("float8", [False, True])
def test_layers_of_one_shape_are_loaded_by_one_launch(codec: str, float8: bool) -> None:
    torch.manual_seed(0)
    layers, (heads, dim) = [0, 2, 4], SHAPES[0]
    scales = KVScales(*(tuple(0.01 + torch.rand(heads) for heads, _ in SHAPES) for _ in "kv")) if float8 else None
    staged = stored_layers(stored_chunks(codec, (5, 6), len(layers), heads, dim, CPU))
    slots = Slots(torch.randperm(64)[:11], *torch.randn(2, 11, dim))
    host = KVPool(SPEC, 4, 16, torch.bfloat16, CPU, scales)  # type: ignore[arg-type]
    for t in host.raw:
        t.zero_()
    TorchBackend().load_layers(staged, [host.layers[layer] for layer in layers], slots)
    with installed() as gpu, pytest.MonkeyPatch.context() as patch:
        watch_launches(gpu, patch)
        compute_with_torch(gpu, patch, TritonBackend)
        there = KVScales(*(tuple(s.to(CUDA) for s in of) for of in (scales.k, scales.v))) if scales else None
        pool = KVPool(SPEC, 4, 16, torch.bfloat16, CUDA, there)  # type: ignore[arg-type]
        for t in pool.raw:
            t.zero_()
        moved = {name: t.to(CUDA) for name, t in vars(staged).items() if isinstance(t, torch.Tensor)}
        where = Slots(*(t.to(CUDA) for t in (slots.slots, slots.cos, slots.sin)))
        before = sum(gpu.found("launch").values())
        TritonBackend(CUDA).load_layers(replace(staged, **moved), [pool.layers[layer] for layer in layers], where)
        assert sum(gpu.found("launch").values()) == before + 1
        assert not gpu.errors
        for ours, wanted in zip(pool.raw, host.raw, strict=True):
            assert torch.equal(unwrapped(ours), wanted)
