"""Weights under our names, copied once from their files into fused tensors."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import Tensor

from cacheblend_cli import user_cache
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.adapter import Delta, LoraAdapter
from cacheblend_cli.model.checkpoint import tensor_source
from cacheblend_cli.model.kv_scales import is_kv_scale
from cacheblend_cli.model.model_files import checkpoint_files
from cacheblend_cli.model.parallel import Shard
from cacheblend_cli.model.sharded import ShardedTensors, cut_deltas
from cacheblend_cli.model.spec import LatentSpec, ModelSpec
from cacheblend_cli.model.tensor_source import TensorSource
from cacheblend_cli.model.weight_map import EMBEDDING, HEAD, TOKEN_EMBEDDING, Shape, expected_shapes, name_in

# Parts of the names of tensors that the language model does not use: RoPE's frequencies, and the heads of reward
# models.
NOT_THE_MODEL = ("rotary_emb.inv_freq", "v_head.", "value_head.")
OWN_MAPPING = 1 << 20  # minimum bytes of a matrix that stays in its file
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
QUANTISED = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax", ".quant_map",
    ".SCB", "_scale_inv",
)  # fmt: skip
Matrices = Literal["now", "late", "hollow"]
IN_FILE = "embed_in_file"  # the embedding if it stays in its file


@dataclass(frozen=True)
class StoredPart:
    """Rows of a weight that stay in their file until the weight is popped."""

    source: TensorSource
    name: str


class Weights(dict[str, Tensor]):
    """Tensors by our names. Some stay in their files until popped, and meta tensors stand for them. copied: whoever
    pops a matrix copies it (packs it, or rounds it to int8), so that the next layer's can have its memory."""

    def __init__(self, copied: bool, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._copied, self._progress = copied, progress
        self._parts: dict[str, dict[int, Tensor | StoredPart]] = {}
        self._rooms: dict[tuple[str, Shape], Tensor] = {}

    def leave(self, name: str, shape: Shape, dtype: torch.dtype, parts: dict[int, Tensor | StoredPart]) -> None:
        """Leave a tensor in its files. parts: by their first row."""
        self[name], self._parts[name] = torch.empty(shape, dtype=dtype, device="meta"), parts

    def pop(self, name: str) -> Tensor:  # type: ignore[override]
        """Remove and return a tensor. One that was left in its files is, if `copied`, valid until the same tensor of
        another layer is popped."""
        held, parts = super().pop(name), self._parts.pop(name, None)
        if parts is None:
            return held
        kind, shape = name.split(".", 1)[-1], tuple(held.shape)  # layers may differ in shape for the same tensor
        room = self._rooms.get((kind, shape))
        if room is None:
            room = _room(shape, held.dtype, torch.device("cpu"))
            if self._copied:
                self._rooms[kind, shape] = room
        starts = sorted(parts)
        for start, end in zip(starts, (*starts[1:], shape[0]), strict=True):
            part = parts[start]
            if isinstance(part, Tensor):
                room[start:end] = part
            else:
                _copy(part.source, part.name, room[start:end])
        self._progress(held.numel())
        return room


def load_weights(
    model: ModelSpec | Shard,
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    adapter: LoraAdapter | None = None,
    matrices: Matrices = "now",
    progress: Callable[[float], None] | None = None,
) -> Weights:
    """Load every tensor of the model under our names (see `weight_map.expected_shapes`), in `dtype` on `device`; norms
    with an offset in float32. For a shard, the rank's part of each.

    Factors and offsets are folded into the weights (see `fold`). Each tensor is copied from its file to its place in
    blocks of rows, and never held twice. An adapter's update is added to each block in float32. On a CPU, large tensors
    that need no conversion stay mapped in the file until popped. The embedding, of which a prompt needs few rows, stays
    mapped for good if the file has plain numbers, in the file's dtype, under the name IN_FILE.

    matrices: when those of OWN_MAPPING bytes or more are read, except embeddings. "now"; "late", on a CPU: one at a
    time, as they are popped, which requires products that copy their weights (see `Weights`); "hollow": never, meta
    tensors stand for them. progress: called with the share of the weights read so far. A tied model's file may hold
    the embedding, the head or both; two that differ are both used, as in transformers.

    Raises UsageError for a missing tensor, a wrong shape, a tensor that is not part of the model, quantised weights,
    and an adapter of another model.
    """
    if isinstance(model, Shard):
        shard, whole, spec = model, model.whole, model.own
    else:
        shard, whole, spec = None, model, model
    shapes = expected_shapes(spec)
    deltas = {} if adapter is None else deltas_of(whole, adapter, expected_shapes(whole))
    if shard is not None:
        deltas = cut_deltas(deltas, shard)
    if spec.tied:
        shapes[HEAD] = ((spec.vocab_size, spec.hidden_size), "lm_head", 0, (spec.vocab_size, spec.hidden_size))
    seen, left = set[str](), dict[str, dict[int, Tensor | StoredPart]]()
    folded = spec.residual_scale != 1 or head_order(spec) is not None
    stays = device.type == "cpu" and not deltas and spec.experts is None and not folded
    source = tensor_source(model_dir, spec.experts)
    if shard is not None:
        source = ShardedTensors(source, shard)
    headers = list(source.headers())
    total, done = sum(math.prod(shape) for *_, shape in headers), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done / max(1, total))

    weights = Weights(matrices == "late", report)
    for stored, kind, found in headers:
        name = name_in(shapes, stored)
        if name is None:
            other = any(part in stored for part in NOT_THE_MODEL) or stored.startswith(spec.other_parts)
            if other or is_kv_scale(stored):
                continue
            if stored.endswith(".bias") and not source.read(stored, 0, found[0] if found else 0).any():
                continue  # GPTQ's tools write a bias for every layer
            hint = f"it is not part of a {spec.architecture}"
            if stored.endswith(QUANTISED):
                hint = "the weights are quantised: use the checkpoint they were made from"
            raise UsageError(f"unexpected tensor {stored} in {model_dir}", hint)
        if kind not in FLOATS:
            raise UsageError(
                f"tensor {stored} in {model_dir} is stored as {kind}: the weights are quantised",
                "use the checkpoint they were made from, in bfloat16, float16 or float32",
            )
        if name in seen:
            raise UsageError(f"{model_dir} holds the tensor {name} twice", "fetch the checkpoint again")
        seen.add(name)
        shape, target, start, full_shape = shapes[name]
        if found != shape:
            raise UsageError(
                f"tensor {stored} has shape {list(found)}, and config.json implies {list(shape)}",
                "the weights and config.json belong to different models",
            )
        kept_as = IN_FILE if name == EMBEDDING else target  # a prompt needs few rows of the embedding
        if kept_as in (IN_FILE, TOKEN_EMBEDDING) and device.type == "cpu" and name not in deltas:
            in_file = source.whole(stored)
            if in_file is not None:
                weights[kept_as] = in_file
                report(in_file.numel())
                continue
        is_large = len(full_shape) == 2 and math.prod(full_shape) * dtype.itemsize >= OWN_MAPPING
        if matrices == "hollow" and is_large and _is_of_product(spec, name, target):
            weights.setdefault(target, torch.empty(full_shape, dtype=dtype, device="meta"))
            continue
        if stays and is_large:
            part: Tensor | StoredPart | None = source.whole(stored)
            if not isinstance(part, Tensor) or part.dtype != dtype:
                later = matrices == "late" and _is_of_product(spec, name, target)
                part = StoredPart(source, stored) if later else None
            if part is not None:
                left.setdefault(target, {})[start] = part
                continue
        if target not in weights:
            part_of = target.split(".", 1)[-1]
            wide = spec.norm_offset and _is_norm(part_of)  # 1 + weight would be rounded in 16 bits
            wide = wide or part_of == "router_correction"  # it decides between scores that are close to each other
            weights[target] = _room(full_shape, torch.float32 if wide else dtype, device)
        _copy(source, stored, weights[target][start : start + shape[0]], deltas.get(name))
        report(math.prod(found))
    full_shapes = {target: shape for _, target, _, shape in shapes.values()}
    for target, parts in left.items():
        if target in weights:  # other parts have another dtype
            for start, rows in parts.items():
                assert isinstance(rows, Tensor)
                weights[target][start : start + len(rows)] = rows
                report(rows.numel())
        elif isinstance(only := parts[min(parts)], Tensor) and only.shape == full_shapes[target]:
            weights[target] = only
            report(only.numel())
        else:
            weights.leave(target, full_shapes[target], dtype, parts)
    if spec.tied and (EMBEDDING in seen or HEAD in seen):
        if matrices == "hollow" and IN_FILE in weights:
            weights["lm_head"] = torch.empty_like(weights[IN_FILE], dtype=dtype, device="meta")
        else:
            _tie(weights, dtype)
        seen |= {EMBEDDING, HEAD}
    missing = sorted(set(shapes) - seen)
    if missing:
        raise UsageError(
            f"{model_dir} lacks {len(missing)} tensors, the first is {missing[0]}", "fetch the checkpoint again"
        )
    fold(spec, weights)
    return weights


def _is_of_product(spec: ModelSpec, name: str, target: str) -> bool:
    """Return whether only products use this weight. Latent attention multiplies with slices of kv_b_proj."""
    elsewhere = target in ("embed", TOKEN_EMBEDDING) or target.endswith(".kv_b_proj.weight")
    return not elsewhere and not (spec.tied and name == HEAD)


def _room(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised tensor. On a CPU it uses anonymous mapped memory, which is returned to the system once
    the weight is packed; the C library's heap would keep it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_MAPPING:
        return torch.empty(shape, dtype=dtype, device=device)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=dtype).view(shape)


def _tie(weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Use one tensor for embedding and head, unless the file holds two different ones."""
    if IN_FILE in weights:
        embed = weights[IN_FILE].to(dtype)
        if "lm_head" not in weights or torch.equal(embed, weights["lm_head"]):
            weights["lm_head"] = embed
        return
    embed = weights["embed"] if "embed" in weights else weights["lm_head"]
    if "lm_head" not in weights or torch.equal(embed, weights["lm_head"]):
        weights["embed"] = weights["lm_head"] = embed


def weights_digest(model_dir: Path) -> str:
    """Return xxh3-128 over all weight files, hex. Cached per (path, size, mtime, inode) in the user's cache."""
    files = checkpoint_files(model_dir)
    stamps = ((str(f.resolve()), s.st_size, s.st_mtime_ns, s.st_ino) for f in files for s in [f.stat()])
    memo = user_cache.place("weights", *stamps)
    if len(known := user_cache.recall(memo)) == 32:
        return known
    digest = xxhash.xxh3_128()
    for file in files:
        with open(file, "rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # type: ignore[arg-type, return-value]
    user_cache.keep(memo, digest.hexdigest())
    return digest.hexdigest()


def deltas_of(
    spec: ModelSpec, adapter: LoraAdapter, shapes: Mapping[str, tuple[Shape, str, int, Shape]]
) -> dict[str, Delta]:
    """Return an adapter's updates by weight. Raises UsageError if the adapter does not fit the model."""
    deltas = {}
    for module, delta in adapter.deltas.items():
        stored = f"{module}.weight"
        name = name_in(shapes, stored)
        if name is None and stored.startswith(spec.other_parts):
            continue
        if name is None:
            raise adapter.misplaced(module, "which the model does not have")
        if name == EMBEDDING or (name == HEAD and spec.tied):
            raise adapter.misplaced(module, "and adapters of the embedding are not implemented")
        adapter.check_shape(module, shapes[name][0])
        deltas[name] = delta
    return deltas


def _copy(source: TensorSource, name: str, target: Tensor, delta: Delta | None = None) -> None:
    """Copy a tensor in blocks of rows."""
    row_bytes = 4 * max(1, target[0].numel())
    step = max(1, source.block_bytes // row_bytes)
    for start in range(0, target.shape[0], step):
        rows = target[start : start + step]
        read = source.read(name, start, start + len(rows))
        rows.copy_(read if delta is None else read.float() + delta.rows(start, start + len(rows)))


def fold(spec: ModelSpec, weights: dict[str, Tensor]) -> None:
    """Fold into the weights, in place and in fp32: the offset of norms, the factor on a layer's output, and our order
    of the channels of q and k. K is stored in that order, and products of q and k do not depend on it."""
    order = head_order(spec)
    for name, weight in weights.items():
        part = name.split(".", 1)[-1]
        if spec.norm_offset and _is_norm(part):
            weight.copy_(weight.float() + spec.norm_offset)
        if spec.residual_scale != 1 and part.startswith(("o_proj", "down_proj")):
            weight.copy_(weight.float() * spec.residual_scale)
        if order is None:
            continue
        if spec.latent is not None:
            _reorder_latent(spec, spec.latent, part, weight, order)
        elif part.startswith("qkv_proj"):
            heads = weight[: spec.q_size + spec.kv_size].unflatten(0, (-1, spec.head_dim))
            heads.copy_(heads[:, order])
        elif part in ("q_norm", "k_norm"):
            heads = weight.unflatten(0, (-1, spec.head_dim))
            heads.copy_(heads[:, order])


def _reorder_latent(spec: ModelSpec, latent: LatentSpec, part: str, weight: Tensor, order: list[int]) -> None:
    """Reorder the rotated channels of latent attention: the last ones of the position key and of each head's q."""
    if part == "q_b_proj.weight" or (part == "qkv_proj.weight" and not latent.query_rank):
        heads = weight[: spec.q_size].unflatten(0, (spec.num_heads, -1))
        heads[:, latent.nope_dim :] = heads[:, latent.nope_dim :][:, order]
    if part.startswith("qkv_proj"):
        weight[-spec.head_dim :] = weight[-spec.head_dim :][order]


def head_order(spec: ModelSpec) -> list[int] | None:
    """Return the permutation of a checkpoint's head channels into ours; None for the identity.

    The kernels rotate channel i with channel i + half. For partial rotation or interleaved pairs, the rotated pairs are
    moved there, and unrotated channels after them in either half.
    """
    rotated = spec.rotated_dim
    if rotated == spec.head_dim and not spec.interleaved:
        return None
    turned, rest = list(range(rotated)), list(range(rotated, spec.head_dim))
    step, half = len(rest) // 2, rotated // 2
    first, second = (turned[0::2], turned[1::2]) if spec.interleaved else (turned[:half], turned[half:])
    return [*first, *rest[:step], *second, *rest[step:]]


def _is_norm(part: str) -> bool:
    return part in ("norm.weight", "weight", "q_norm", "k_norm") or part.split(".")[0].endswith(("_in", "_out"))
