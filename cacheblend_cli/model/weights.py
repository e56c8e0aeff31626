"""Weights under our names: fused tensors copied from their files, and tables of rows that stay there."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from cacheblend_kernels import RowTable, compiled
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.checkpoint import tensor_source
from cacheblend_cli.model.device import check_host_room
from cacheblend_cli.model.host_memory import available_memory
from cacheblend_cli.model.kv_scales import is_kv_scale
from cacheblend_cli.model.linear import Weight
from cacheblend_cli.model.parallel import Shard
from cacheblend_cli.model.spec import LatentSpec, ModelSpec
from cacheblend_cli.model.tensor_source import TensorSource
from cacheblend_cli.model.weight_map import EMBEDDING, HEAD, TOKEN_EMBEDDING, Shape, expected_shapes, name_in

if TYPE_CHECKING:
    from cacheblend_cli.model.adapter import Delta, LoraAdapter

# Parts of the names of tensors that the language model does not use: RoPE's frequencies, and the heads of reward
# models.
NOT_THE_MODEL = ("rotary_emb.inv_freq", "v_head.", "value_head.")
OWN_MAPPING = 1 << 20  # minimum bytes of a copied matrix with memory of its own
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
IN_TABLES = (
    "embed", "lm_head", TOKEN_EMBEDDING, "qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight", "down_proj.weight",
    "q_b_proj.weight", "experts_up.weight", "experts_down.weight", "token_model.weight", "token_gate.weight",
    "token_projection.weight", "laurel_left.weight", "laurel_right.weight",
)  # fmt: skip
"""Our tensors that only products, and look-ups of rows, use. (Latent attention multiplies with slices of kv_b_proj.)"""
Weights = dict[str, Weight]


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of the checkpoint: its name in the file and in the model, and its place in one of our tensors."""

    stored: str
    name: str
    shape: Shape
    target: str  # our tensor
    start: int  # first row in it
    full_shape: Shape  # shape of our tensor


def load_weights(
    model: ModelSpec | Shard,
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    adapter: LoraAdapter | None = None,
    progress: Callable[[float], None] | None = None,
    source: TensorSource | None = None,
) -> Weights:
    """Load every tensor of the model under our names (see `weight_map.expected_shapes`), in `dtype` on `device`; norms
    with an offset in float32. For a shard, the rank's part of each.

    On a CPU with compiled products the matrices of IN_TABLES are tables of rows, which stay in the file wherever its
    types are multiplied. Everything else is copied from its file to its place in blocks of rows, and never held twice.
    An adapter's update is added to each block in float32. Factors and offsets are folded into the weights (see `fold`).

    progress: called with the share of the weights read so far. source: of the tensors, None for the directory's. A tied
    model's file may hold the embedding, the head or both; if they differ, both are used, as in transformers.

    Raises UsageError for a missing tensor, a wrong shape, a tensor that is not part of the model, quantised weights,
    and an adapter of another model.
    """
    part = model if isinstance(model, Shard) else Shard(model)
    spec = part.own
    deltas = {} if adapter is None else part.deltas(deltas_of(part.whole, adapter, expected_shapes(part.whole)))
    source = part.tensors(source or tensor_source(model_dir, spec.experts))
    tensors = check_tensors(spec, source, model_dir)
    loader = _Loader(spec, source, dtype, device, deltas)
    tables = [loader.table(tensor) for tensor in tensors]
    if device.type == "cpu":
        copied = (math.prod(t.shape) for t, table in zip(tensors, tables, strict=True) if table is None)
        check_host_room(sum(copied) * dtype.itemsize, dtype, available_memory())
    done, total = 0, sum(math.prod(tensor.shape) for tensor in tensors)
    for tensor, table in zip(tensors, tables, strict=True):
        loader.add(tensor, table)
        done += math.prod(tensor.shape)
        if progress is not None:
            progress(done / max(1, total))
    weights = loader.finish()
    if spec.tied:
        _tie(weights)
    fold(spec, weights)
    return weights


def check_tensors(spec: ModelSpec, source: TensorSource, model_dir: Path) -> list[WeightTensor]:
    """Return the model's tensors in the checkpoint. Raises UsageError for missing, duplicate and unexpected tensors."""
    shapes = expected_shapes(spec)
    if spec.tied:
        shapes[HEAD] = ((spec.vocab_size, spec.hidden_size), "lm_head", 0, (spec.vocab_size, spec.hidden_size))
    tensors = dict[str, WeightTensor]()
    for stored, kind, found in source.headers():
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
    hint = (
        f"it is not part of a {spec.architecture}; if the weights are quantised, use the checkpoint they were made from"
    )
    raise UsageError(f"unexpected tensor {stored} in {model_dir}", hint)


@dataclass
class _Loader:
    """Decides for each tensor whether its rows stay in the file, and adds it to the weights."""

    spec: ModelSpec
    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    deltas: Mapping[str, Delta]

    def __post_init__(self) -> None:
        self._copied: dict[str, Tensor] = {}
        self._tables: dict[str, dict[int, RowTable]] = {}  # parts by their first row
        self._multiplies = self.device.type == "cpu" and compiled.multiplies(self.dtype)

    def table(self, tensor: WeightTensor) -> RowTable | None:
        """Return the tensor's rows in the file if they are used there."""
        stays = self._in_table(tensor) and tensor.name not in self.deltas
        return self.source.rows(tensor.stored) if stays else None

    def add(self, tensor: WeightTensor, table: RowTable | None) -> None:
        """Add a tensor, copied unless it is in a table."""
        target, start = tensor.target, tensor.start
        if table is None:
            if in_table := self._in_table(tensor):
                rows = _room(tensor.shape, self.dtype, self.device)
            else:
                if target not in self._copied:
                    self._copied[target] = _room(tensor.full_shape, self._dtype_of(target), self.device)
                rows = self._copied[target][start : start + tensor.shape[0]]
            _copy(self.source, tensor.stored, rows, self.deltas.get(tensor.name))
            table = RowTable.of(rows) if in_table else None
        if table is not None:
            self._tables.setdefault(target, {})[start] = table

    def _in_table(self, tensor: WeightTensor) -> bool:
        is_used_by_rows = tensor.target in IN_TABLES or tensor.target.split(".", 1)[-1] in IN_TABLES
        return self._multiplies and is_used_by_rows and tensor.shape[-1] % compiled.MULTIPLE == 0

    def finish(self) -> Weights:
        tables = {target: RowTable.cat([parts[i] for i in sorted(parts)]) for target, parts in self._tables.items()}
        return {**self._copied, **tables}

    def _dtype_of(self, target: str) -> torch.dtype:
        part = target.split(".", 1)[-1]
        wide = self.spec.norm_offset and _is_norm(part)  # 1 + weight would be rounded in 16 bits
        wide = wide or part == "router_correction"  # it decides between scores that are close to each other
        return torch.float32 if wide else self.dtype


def _room(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised tensor. On a CPU it uses anonymous mapped memory, which returns to the system with the
    model; the C library's heap would keep it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_MAPPING:
        return torch.empty(shape, dtype=dtype, device=device)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=dtype).view(shape)


def _tie(weights: Weights) -> None:
    """Use one tensor for embedding and head, unless the file holds two different ones."""
    embed, head = weights.get("embed"), weights.get("lm_head")
    if embed is None or head is None:
        weights["embed"] = weights["lm_head"] = embed if head is None else head  # type: ignore[assignment]
    elif isinstance(embed, Tensor) and isinstance(head, Tensor) and torch.equal(embed, head):
        weights["lm_head"] = embed


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


def _copy(source: TensorSource, name: str, target: Tensor, delta: Delta | None) -> None:
    row_bytes = 4 * max(1, target[0].numel())
    step = max(1, source.block_bytes // row_bytes)
    for start in range(0, target.shape[0], step):
        rows = target[start : start + step]
        read = source.read(name, start, start + len(rows))
        rows.copy_(read if delta is None else read.float() + delta.rows(start, start + len(rows)))


def fold(spec: ModelSpec, weights: Weights) -> None:
    """Fold into the weights, in place and in fp32: the offset of norms, the factor on a layer's output, and our order
    of the channels of q and k. K is stored in that order, and products of q and k do not depend on it."""
    order = head_order(spec)
    for name, weight in weights.items():
        part = name.split(".", 1)[-1]
        if spec.residual_scale != 1 and part.startswith(("o_proj", "down_proj")):
            if isinstance(weight, RowTable):
                weights[name] = replace(weight, factor=weight.factor * spec.residual_scale)
            else:
                weight.copy_(weight.float() * spec.residual_scale)
        if isinstance(weight, Tensor) and spec.norm_offset and _is_norm(part):
            weight.copy_(weight.float() + spec.norm_offset)
        if order is not None:
            for rows in (weight.addresses, weight.kinds) if isinstance(weight, RowTable) else (weight,):
                _reorder(spec, part, rows, order)


def _reorder(spec: ModelSpec, part: str, rows: Tensor, order: list[int]) -> None:
    """Reorder the channels of q and k among the rows of a weight, [num_rows, ...], in place."""
    if spec.latent is not None:
        _reorder_latent(spec, spec.latent, part, rows, order)
    elif part.startswith("qkv_proj"):
        heads = rows[: spec.q_size + spec.kv_size].unflatten(0, (-1, spec.head_dim))
        heads.copy_(heads[:, order])
    elif part in ("q_norm", "k_norm"):
        heads = rows.unflatten(0, (-1, spec.head_dim))
        heads.copy_(heads[:, order])


def _reorder_latent(spec: ModelSpec, latent: LatentSpec, part: str, rows: Tensor, order: list[int]) -> None:
    """Reorder the rotated channels of latent attention: the last ones of the position key and of each head's q."""
    if part == "q_b_proj.weight" or (part == "qkv_proj.weight" and not latent.query_rank):
        heads = rows[: spec.q_size].unflatten(0, (spec.num_heads, -1))
        heads[:, latent.nope_dim :] = heads[:, latent.nope_dim :][:, order]
    if part.startswith("qkv_proj"):
        rows[-spec.head_dim :] = rows[-spec.head_dim :][order]


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
