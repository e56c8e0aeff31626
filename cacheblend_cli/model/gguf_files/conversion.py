"""A GGUF file as a model directory: converted once per file, and kept in the user's cache."""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_store.private_files import create, make_folder, open_folder

from cacheblend_cli import user_cache
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_files.architectures import Metadata, architecture_of
from cacheblend_cli.model.gguf_files.config import FACTORS, config_of
from cacheblend_cli.model.gguf_files.tensors import StoredTensor, is_readable, write_index
from cacheblend_cli.model.gguf_names import is_model
from cacheblend_cli.model.model_files import GGUF_INDEX
from cacheblend_cli.model.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor, TensorNameMap

FORMAT = 4  # version of a conversion's output: increase it when the output changes
OF_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.(weight|bias)")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a directory. Raises UsageError if there are several."""
    found = sorted(p for p in folder.glob("*.gguf") if is_model(p.name))
    if len(found) > 1:
        raise UsageError(
            f"{folder} holds {len(found)} GGUF files",
            f"name one, such as --model {found[0]}; there is also {found[1].name}",
        )
    return found[0] if found else None


def model_dir_of(file: Path, say: Callable[[str], None] | None = None) -> Path:
    """Return the directory that stands for a GGUF file. say: called when the file is read for the first time. Raises
    UsageError, naming what cannot be read."""
    try:
        at = file.resolve(strict=True)
        stat = at.stat()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "check the path") from error
    kept = user_cache.place("gguf", FORMAT, str(at), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if _is_kept(kept):
        return kept
    if say:
        say(f"reading {file.name} for the first time: its tokenizer and tensor index are cached")
    try:
        make_folder(kept.parent)
        folder = Path(tempfile.mkdtemp(dir=kept.parent, prefix="new-"))
    except OSError:  # nothing can be kept: convert for this process only
        folder = kept = Path(tempfile.mkdtemp(prefix="cacheblend-gguf-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
    try:
        _convert(at, stat, folder)
        if folder != kept:
            _put_in_place(folder, kept)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return kept


def _is_kept(folder: Path) -> bool:
    """Return whether the folder is a conversion of this user."""
    try:
        os.close(open_folder(folder))
    except OSError:
        return False
    return (folder / GGUF_INDEX).is_file()


def _put_in_place(folder: Path, kept: Path) -> None:
    """Move the folder into place atomically; another process may have been faster."""
    try:
        os.replace(folder, kept)
    except OSError:
        if not _is_kept(kept):
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _convert(file: Path, status: os.stat_result, folder: Path) -> None:
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
