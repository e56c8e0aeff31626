"""Index of a GGUF file's tensors by transformers' names."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from cacheblend_cli.model.gguf_files.architectures import Metadata, architecture_of
from cacheblend_cli.model.gguf_files.rope import FACTORS
from cacheblend_cli.model.gguf_files.tensors import StoredTensor
from cacheblend_cli.model.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor, TensorNameMap

OF_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.(weight|bias)")


def index_of(reader: GGUFReader, config: dict[str, Any], metadata: Metadata) -> dict[str, StoredTensor]:
    """Return the tensors under transformers' names. Tensors that no model of this family has keep their own."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from cacheblend_cli.model.families import spec_from_config
    from cacheblend_cli.model.weight_map import expected_shapes

    name = metadata["general.architecture"]
    arch, architecture = next(k for k, n in MODEL_ARCH_NAMES.items() if n == name), architecture_of(name, metadata)
    name_map, spec = get_tensor_name_map(arch, config["num_hidden_layers"]), spec_from_config(config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    held, used, index = {t.name: t for t in reader.tensors}, set[str](), dict[str, StoredTensor]()
    for name, (shape, *_) in expected_shapes(spec).items():
        own, expert = _own_name(name, spec, name_map, held)
        if own not in held or (expert is not None and expert >= held[own].shape[-1]):
            continue  # loading the weights reports what is missing
        part = name.split(".")[-2]
        index[name] = _stored(
            held[own],
            shape,
            expert,
            permuted_heads=heads.get(part, 0) if architecture.permuted else 0,
            offset_of_norm=architecture.norm_offset if part.endswith("norm") else 0.0,
        )
        used.add(own)
    for own in held.keys() - used - set(FACTORS):
        index[own] = _stored(held[own], (), None)
    return index


def _own_name(
    name: str, spec: ModelSpec, name_map: TensorNameMap, held: Mapping[str, ReaderTensor]
) -> tuple[str | None, int | None]:
    """Return the file's name of a tensor, and the number of its expert: all experts are in one tensor or, in older
    files, in one each."""
    match = OF_EXPERT.fullmatch(name)
    if match is None or spec.experts is None:
        own = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        return (f"{own}.weight" if own is not None and own not in held and "sinks" in name else own), None
    layer, expert, part, kind = match.groups()
    own = f"blk.{layer}.ffn_{('gate', 'up', 'down')[spec.experts.names.index(part)]}"
    if f"{own}.{expert}.{kind}" in held:
        return f"{own}.{expert}.{kind}", None
    return f"{own}_exps.{kind}", int(expert)


def _stored(tensor: ReaderTensor, wanted: Collection[int], expert: int | None, **read: Any) -> StoredTensor:
    """Return the stored tensor. wanted: expected shape, used if the file's shape lacks only dimensions of 1."""
    shape, size = tuple(int(n) for n in reversed(tensor.shape)), int(tensor.n_bytes)
    offset = int(tensor.data_offset)
    if expert is not None:
        count, shape = shape[0], shape[1:]
        size //= count
        offset += expert * size
    elif math.prod(shape) == math.prod(wanted) and shape != tuple(wanted) and 1 in wanted:
        shape = tuple(wanted)
    return StoredTensor(tensor.tensor_type.name, shape, offset, size, **read)
