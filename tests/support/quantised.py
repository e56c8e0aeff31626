"""Quantised checkpoints, by the definition of their formats, and the weights that they represent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = tuple[dict[str, Tensor], Tensor]  # what is stored behind the module's name, and the weight it stands for
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
E4M3_MOST = 448.0


def write_quantised(
    checkpoint: Path, quantise: Callable[[Tensor], Parts], config: dict[str, Any] | None, plain: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Quantise the checkpoint's linear layers in place, but those with `plain` in their name.

    Returns all weights as they are to be read, float32.
    """
    held, stored, read = load_file(checkpoint / "model.safetensors"), dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in held.items():
        base = name.removesuffix("weight")
        if not name.endswith(tuple(f"{part}.weight" for part in PARTS)) or any(part in name for part in plain):
            stored[name] = read[name] = weight
            continue
        parts, read[name] = quantise(weight)
        stored |= {f"{base}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, checkpoint / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return {name: weight.float().contiguous() for name, weight in read.items()}


def in_blocks(
    rows: int, columns: int, scale: str = "weight_scale", kind: torch.dtype = torch.float8_e4m3fn
) -> Callable[[Tensor], Parts]:
    """Quantise to eight bits with one scale per block."""

    def quantise(weight: Tensor) -> Parts:
        out, into = weight.shape
        grid = torch.zeros(-(-out // rows), -(-into // columns))
        most = E4M3_MOST if kind == torch.float8_e4m3fn else 127.0
        stored, read = torch.empty(out, into, dtype=kind), torch.empty(out, into)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                grid[i, j] = weight[at].abs().max() / most
                values = weight[at] / grid[i, j]
                stored[at] = (values if kind.is_floating_point else values.round()).to(kind)
                read[at] = stored[at].float() * grid[i, j]
        return {"weight": stored, scale: grid}, read

    return quantise


def by_row(kind: torch.dtype) -> Callable[[Tensor], Parts]:
    return lambda weight: in_blocks(1, weight.shape[1], kind=kind)(weight)


def in_one(weight: Tensor) -> Parts:
    """One scale, as [1], and the scale of the activations."""
    parts, read = in_blocks(*weight.shape)(weight)
    return {
        "weight": parts["weight"],
        "weight_scale": parts["weight_scale"].reshape(1),
        "input_scale": torch.ones(1),
    }, read


def gptq(
    bits: int, group: int, sym: bool = False, act_order: bool = False, zero_offset: int = 1, g_idx: bool = True
) -> Callable[[Tensor], Parts]:
    def quantise(weight: Tensor) -> Parts:
        into = weight.shape[1]
        size = into if group == -1 else group
        groups = torch.arange(into) // size
        if act_order:
            groups = groups[torch.randperm(into, generator=torch.Generator().manual_seed(3))]
        values, zeros, scales, read = _affine(weight, groups, bits, sym)
        parts = {
            "qweight": _pack(values, bits).T,  # [in, out] packed along the inputs
            "qzeros": _pack(zeros - zero_offset, bits),
            "scales": scales,
        }
        return parts | ({"g_idx": groups.int()} if g_idx else {}), read

    return quantise


def awq(group: int) -> Callable[[Tensor], Parts]:
    def quantise(weight: Tensor) -> Parts:
        values, zeros, scales, read = _affine(weight, torch.arange(weight.shape[1]) // group, 4, False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of eight that is packed first, second, ...

        def pack(matrix: Tensor) -> Tensor:
            return _pack(matrix.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

        return {"qweight": pack(values.T), "qzeros": pack(zeros), "scales": scales}, read

    return quantise


def _affine(weight: Tensor, groups: Tensor, bits: int, sym: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values [out, in], zeros and float16 scales [groups, out], and what they stand for [out, in].

    Zero points are 1 at least: version 1 of GPTQ stores one less.
    """
    most, count = 2**bits - 1, int(groups.max()) + 1
    values, read = torch.empty(weight.shape, dtype=torch.int64), torch.empty(weight.shape)
    zeros, scales = (
        torch.empty(count, len(weight), dtype=torch.int64),
        torch.empty(count, len(weight), dtype=torch.float16),
    )
    for g in range(count):
        part = weight[:, groups == g]
        low, high = part.amin(1), part.amax(1)
        if sym:
            high = torch.maximum(high, -low)
            low = -high
        scales[g] = ((high - low) / most).half()
        zeros[g] = 2 ** (bits - 1) if sym else (-low / scales[g].float()).round().clamp(1, most)
        zero, scale = zeros[g][:, None], scales[g].float()[:, None]
        values[:, groups == g] = (part / scale + zero).round().clamp(0, most).long()
        read[:, groups == g] = scale * (values[:, groups == g] - zero)
    return values, zeros, scales, read


def _pack(matrix: Tensor, bits: int) -> Tensor:
    """[a, b] -> [a, b * bits / 32] int32, the first in the lowest bits."""
    per, packed = 32 // bits, torch.zeros(matrix.shape[0], matrix.shape[1] * bits // 32, dtype=torch.int64)
    for i in range(per):
        packed |= matrix[:, i::per] << (bits * i)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()
