"""Convert a GGUF file to a model directory."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_store.private_files import create

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_files.architectures import Metadata, architecture_of
from cacheblend_cli.model.gguf_files.config import FACTORS, config_of
from cacheblend_cli.model.gguf_files.tensors import StoredTensor, is_readable, write_index
from cacheblend_cli.model.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor, TensorNameMap

OF_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.(weight|bias)")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def convert(file: Path, status: os.stat_result, folder: Path) -> None:
    """Write the directory that stands for a file. Raises UsageError, naming what cannot be read."""
    from cacheblend_cli.model.gguf_files.reader import CheckedReader
    from cacheblend_cli.model.gguf_files.tokenizer import write_tokenizer

    try:
        reader = CheckedReader(str(file))
        metadata = {name: _value(field) for name, field in reader.fields.items()}
    except EOFError as error:
        raise UsageError(f"{file} is truncated: {error}", "fetch it again") from error
    except Exception as error:  # the gguf package raises anything on damaged bytes
        raise UsageError(f"{file} is not a readable GGUF file: {error}", "fetch it again") from error
    if reader.byte_order != "I":
        raise UsageError(f"{file} is a big-endian GGUF file, which is not read", "use a little-endian one")
    if metadata.get("split.count", 1) > 1:
        raise UsageError(
            f"{file.name} is one of {metadata['split.count']} parts of a model",
            "merge them with llama-gguf-split --merge",
        )
    tensors = {t.name: t for t in reader.tensors}
    for tensor in reader.tensors:
        if not is_readable(tensor.tensor_type):
            raise UsageError(
                f"{file.name} holds tensors of the type {tensor.tensor_type.name}, which is not read",
                "use another quantisation of the model, such as Q8_0, Q6_K or Q4_K_M",
            )
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    factors = {name: tensors[name].data for name in FACTORS if name in tensors}
    config = config_of(metadata, shapes, factors, _dtype(reader))
    create(folder / "config.json", json.dumps(config, indent=2).encode())
    write_tokenizer(file, metadata, folder)
    write_index(folder, file, status, _index_of(reader, config, metadata))


def _value(field: Any) -> Any:
    """Return a value of the metadata, None for long lists (the vocabulary): transformers reads the tokenizer."""
    from cacheblend_cli.model.gguf_files.reader import LONG

    return field.contents() if len(field.data) < LONG else None


def _dtype(reader: GGUFReader) -> str:
    """Return the most common dtype of the weights, bfloat16 if they are quantised."""
    kinds = [t.tensor_type.name for t in reader.tensors if len(t.shape) > 1]
    return DTYPES.get(max(set(kinds), key=kinds.count, default=""), "bfloat16")


def _index_of(reader: GGUFReader, config: dict[str, Any], metadata: Metadata) -> dict[str, StoredTensor]:
    """Return the tensors under transformers' names. Tensors unknown to the family keep their own names."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from cacheblend_cli.model.families import spec_from_config
    from cacheblend_cli.model.weight_map import expected_shapes

    name = metadata["general.architecture"]
    arch, architecture = next(k for k, n in MODEL_ARCH_NAMES.items() if n == name), architecture_of(name, metadata)
    name_map, spec = get_tensor_name_map(arch, config["num_hidden_layers"]), spec_from_config(config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    heads = heads if architecture.permuted else {}
    held, used, index = {t.name: t for t in reader.tensors}, set[str](), dict[str, StoredTensor]()
    for name, (shape, *_) in expected_shapes(spec).items():
        own, expert = _own_name(name, spec, name_map, held)
        if own not in held or (expert is not None and expert >= held[own].shape[-1]):
            continue  # loading the weights reports what is missing
        part = name.split(".")[-2]
        offset, permuted = architecture.norm_offset if part.endswith("norm") else 0.0, heads.get(part, 0)
        index[name] = _stored(held[own], shape, expert, permuted_heads=permuted, offset_of_norm=offset)
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
