"""Weights under our names, copied once from their files into fused tensors."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
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


Header = tuple[str, str, Shape]  # name, dtype and shape of a stored tensor


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of the checkpoint: its name in the file and in the model, and its place in one of our tensors."""

    stored: str
    name: str
    shape: Shape
    target: str  # our tensor
    start: int  # first row in it
    full_shape: Shape  # shape of our tensor


@dataclass(frozen=True)
class StoredPart:
    """Rows of a weight that stay in their file until the weight is popped."""

    source: TensorSource
    name: str


Place = tuple[Literal["mapped", "hollow", "late", "copied"], Tensor | StoredPart | None]
"""Where numbers are until they are used: in their file for good, nowhere, in their file until the weight is popped, or
in memory; and the part of the file."""


class Weights(dict[str, Tensor]):
    """Tensors by our names. Some stay in their files until popped; meta tensors replace them. copied: popped matrices
    are copied at once (packed, or rounded to int8), so that the next layer's can use the memory."""

    def __init__(self, copied: bool, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._copied, self._progress = copied, progress
        self._parts: dict[str, dict[int, Tensor | StoredPart]] = {}
        self._rooms: dict[tuple[str, Shape], Tensor] = {}

    def leave(self, name: str, shape: Shape, dtype: torch.dtype, parts: dict[int, Tensor | StoredPart]) -> None:
        """Leave a tensor in its files. parts: by their first row."""
        self[name], self._parts[name] = torch.empty(shape, dtype=dtype, device="meta"), parts

    def pop(self, name: str) -> Tensor:  # type: ignore[override]
        """Remove and return a tensor. If `copied`, a tensor that was left in its files is valid until another layer's
        is popped."""
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

    matrices: when matrices of OWN_MAPPING bytes or more are read, except embeddings. "now"; "late" (CPU only): when
    they are popped, which requires products that copy their weights (see `Weights`); "hollow": never, they are meta
    tensors. progress: called with the share of the weights read so far. A tied model's file may hold the embedding, the
    head or both; if they differ, both are used, as in transformers.

    Raises UsageError for a missing tensor, a wrong shape, a tensor that is not part of the model, quantised weights,
    and an adapter of another model.
    """
    part = model if isinstance(model, Shard) else Shard(model)
    spec = part.own
    deltas = {} if adapter is None else part.deltas(deltas_of(part.whole, adapter, expected_shapes(part.whole)))
    source = part.tensors(tensor_source(model_dir, spec.experts))
    headers = list(source.headers())
    tensors = _checked(spec, source, headers, model_dir)
    report = _share_of(sum(math.prod(shape) for *_, shape in headers), progress)
    loader = _Loader(spec, source, dtype, device, deltas, matrices, report)
    for tensor in tensors:
        loader.add(tensor)
    weights = loader.finish()
    if spec.tied:
        if matrices == "hollow" and IN_FILE in weights:
            weights["lm_head"] = torch.empty_like(weights[IN_FILE], dtype=dtype, device="meta")
        else:
            _tie(weights, dtype)
    fold(spec, weights)
    return weights


def _share_of(total: int, progress: Callable[[float], None] | None) -> Callable[[int], None]:
    """Return a callback that takes counts of read numbers, and reports their share of the total."""
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done / max(1, total))

    return report


def _checked(spec: ModelSpec, source: TensorSource, headers: Iterable[Header], model_dir: Path) -> list[WeightTensor]:
    """Return the model's tensors in the checkpoint. Raises UsageError for missing, duplicate and unexpected tensors."""
    shapes = expected_shapes(spec)
    if spec.tied:
        shapes[HEAD] = ((spec.vocab_size, spec.hidden_size), "lm_head", 0, (spec.vocab_size, spec.hidden_size))
    tensors = dict[str, WeightTensor]()
    for stored, kind, found in headers:
        name = name_in(shapes, stored)
        if name is None:
            _check_unused(spec, source, stored, found, model_dir)
            continue
        if kind not in FLOATS:
            raise UsageError(
                f"tensor {stored} in {model_dir} is stored as {kind}: the weights are quantised",
                "use the checkpoint they were made from, in bfloat16, float16 or float32",
            )
        if name in tensors:
            raise UsageError(f"{model_dir} holds the tensor {name} twice", "fetch the checkpoint again")
        tensors[name] = WeightTensor(stored, name, *shapes[name])
        if found != tensors[name].shape:
            raise UsageError(
                f"tensor {stored} has shape {list(found)}; config.json implies {list(tensors[name].shape)}",
                "the weights and config.json belong to different models",
            )
    one_of = {EMBEDDING, HEAD} if spec.tied and tensors.keys() & {EMBEDDING, HEAD} else set[str]()
    missing = sorted(shapes.keys() - tensors.keys() - one_of)
    if missing:
        raise UsageError(
            f"{model_dir} lacks {len(missing)} tensors (first: {missing[0]})", "fetch the checkpoint again"
        )
    return list(tensors.values())


def _check_unused(spec: ModelSpec, source: TensorSource, stored: str, found: Shape, model_dir: Path) -> None:
    """Raise UsageError for a tensor outside the model, unless the model computes the same without it."""
    if any(part in stored for part in NOT_THE_MODEL) or stored.startswith(spec.other_parts) or is_kv_scale(stored):
        return
    if stored.endswith(".bias") and not source.read(stored, 0, found[0] if found else 0).any():
        return  # GPTQ's tools write a bias for every layer
    hint = f"it is not part of a {spec.architecture}"
    if stored.endswith(QUANTISED):
        hint = "the weights are quantised: use the checkpoint they were made from"
    raise UsageError(f"unexpected tensor {stored} in {model_dir}", hint)


@dataclass
class _Loader:
    """Decides for each tensor where its data stays until it is used, and adds it to the weights."""

    spec: ModelSpec
    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    deltas: Mapping[str, Delta]
    matrices: Matrices
    report: Callable[[int], None]

    def __post_init__(self) -> None:
        folded = self.spec.residual_scale != 1 or head_order(self.spec) is not None
        self._stays = self.device.type == "cpu" and not self.deltas and self.spec.experts is None and not folded
        self._weights = Weights(self.matrices == "late", self.report)
        self._late: dict[str, tuple[Shape, dict[int, Tensor | StoredPart]]] = {}  # parts by their first row

    def add(self, tensor: WeightTensor) -> None:
        weights, target, start = self._weights, tensor.target, tensor.start
        match self._place(tensor):
            case "mapped", Tensor() as numbers:
                weights[IN_FILE if tensor.name == EMBEDDING else target] = numbers
                self.report(numbers.numel())
            case "hollow", _:
                weights.setdefault(target, torch.empty(tensor.full_shape, dtype=self.dtype, device="meta"))
            case "late", part if part is not None:
                self._late.setdefault(target, (tensor.full_shape, {}))[1][start] = part
            case _:
                if target not in weights:
                    weights[target] = _room(tensor.full_shape, self._dtype_of(target), self.device)
                rows = weights[target][start : start + tensor.shape[0]]
                _copy(self.source, tensor.stored, rows, self.deltas.get(tensor.name))
                self.report(math.prod(tensor.shape))

    def finish(self) -> Weights:
        """Return the weights. A tensor stays in its file if no part of it was copied."""
        weights = self._weights
        for target, (shape, parts) in self._late.items():
            if target in weights:  # other parts have another dtype
                for start, rows in parts.items():
                    assert isinstance(rows, Tensor)
                    weights[target][start : start + len(rows)] = rows
                    self.report(rows.numel())
            elif isinstance(only := parts[min(parts)], Tensor) and only.shape == shape:
                weights[target] = only
                self.report(only.numel())
            else:
                weights.leave(target, shape, self.dtype, parts)
        return weights

    def _place(self, tensor: WeightTensor) -> Place:
        of_tokens = tensor.name == EMBEDDING or tensor.target == TOKEN_EMBEDDING
        if of_tokens and self.device.type == "cpu" and tensor.name not in self.deltas:  # a prompt needs few rows
            in_file = self.source.whole(tensor.stored)
            if in_file is not None:
                return "mapped", in_file
        is_large = len(tensor.full_shape) == 2 and math.prod(tensor.full_shape) * self.dtype.itemsize >= OWN_MAPPING
        if is_large and self.matrices == "hollow" and _is_of_product(self.spec, tensor):
            return "hollow", None
        if is_large and self._stays:
            rows = self.source.whole(tensor.stored)
            if rows is not None and rows.dtype == self.dtype:
                return "late", rows
            if self.matrices == "late" and _is_of_product(self.spec, tensor):
                return "late", StoredPart(self.source, tensor.stored)
        return "copied", None

    def _dtype_of(self, target: str) -> torch.dtype:
        part = target.split(".", 1)[-1]
        wide = self.spec.norm_offset and _is_norm(part)  # 1 + weight would be rounded in 16 bits
        wide = wide or part == "router_correction"  # it decides between scores that are close to each other
        return torch.float32 if wide else self.dtype


def _is_of_product(spec: ModelSpec, tensor: WeightTensor) -> bool:
    """Return whether only products use this weight. (Latent attention multiplies with slices of kv_b_proj.)"""
    elsewhere = tensor.target in ("embed", TOKEN_EMBEDDING) or tensor.target.endswith(".kv_b_proj.weight")
    return not elsewhere and not (spec.tied and tensor.name == HEAD)


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
