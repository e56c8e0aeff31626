"""Weights of a checkpoint, quantised once into a GGUF file that is kept in the user's cache.

A folder holds the file and its index, which is written last: `GGUFTensors` reads it like a converted GGUF file. The
index has the file's modification time, so a file that was cut or changed is written again.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cacheblend_store.private_files import locked, make_folder, open_folder

from cacheblend_cli import user_cache
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_files.tensors import GGUFTensors, StoredTensor, write_index
from cacheblend_cli.model.model_files import GGUF_INDEX
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import TensorSource
from cacheblend_cli.model.weight_map import HEAD, expected_shapes, name_in

KINDS = {"int8": "Q8_0", "int4": "Q4_1"}
"""Weight dtype -> name of the GGMLQuantizationType."""
PLAIN = ("F32", "F16", "BF16")
FORMAT = 1  # version of the files' content: increase it when that changes
FILE = "weights.gguf"
KEPT = ("router", "streams_router", "shared_gate")  # matrices that stay in float32: small, and they decide
HEADER_BYTES = 8 << 20  # room on the disk besides the tensors


def quantised_folder(
    source: TensorSource,
    spec: ModelSpec,
    weight_dtype: str,
    digest: str,
    progress: Callable[[float], None] | None = None,
) -> Path:
    """Return the folder with the quantised weights, which is written first unless it exists.

    Matrices are quantised; routers, norms, biases, and matrices whose rows are not whole blocks become float32. Tensors
    keep the checkpoint's names; those that the model does not use are left out. source: the checkpoint, already
    checked. weight_dtype: one of KINDS. digest: of everything that the weights depend on. progress: called with the
    share of the weights written so far. Raises UsageError if the source is a quantised GGUF file, or if the file cannot
    be written, such as on a full disk.
    """
    if isinstance(source, GGUFTensors) and not {tensor.kind for tensor in source.index.values()} <= set(PLAIN):
        raise UsageError(
            f"--weight-dtype {weight_dtype} is for unquantised checkpoints, and {source.file} is quantised already",
            "leave --weight-dtype out",
        )
    home = user_cache.folder(user_cache.QUANTISED)
    folder = user_cache.place(user_cache.QUANTISED, FORMAT, weight_dtype, digest, str(home))
    if is_intact(folder):
        return folder
    try:
        make_folder(home)
        with locked(home / "lock"):  # one process writes, the others wait for its file
            if not is_intact(folder):
                for left in (folder, *home.glob("*.part")):  # damaged, or of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                _write(folder, source, _plan(source, spec, KINDS[weight_dtype]), progress or (lambda share: None))
    except OSError as error:
        raise UsageError(
            f"weights in {weight_dtype} cannot be written to {home}: {error.strerror or error}",
            "leave --weight-dtype out, or make room there (cacheblend models clear removes files of other models)",
        ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """Return whether a folder of this user has the whole file, unchanged since it was written."""
    try:
        os.close(open_folder(folder))
        return (folder / GGUF_INDEX).stat().st_mtime_ns == (folder / FILE).stat().st_mtime_ns
    except OSError:
        return False


def _plan(source: TensorSource, spec: ModelSpec, quantised: str) -> dict[str, StoredTensor]:
    """Return the tensors of the file, without their offsets. quantised: kind of the matrices."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    targets = {name: target for name, (_, target, *_) in expected_shapes(spec).items()} | {HEAD: "lm_head"}
    plan = {}
    for stored, _, shape in source.headers():
        name = name_in(targets, stored)
        if name is None:
            continue
        values, _ = GGML_QUANT_SIZES[GGMLQuantizationType[quantised]]
        fits = len(shape) == 2 and shape[1] % values == 0
        kind = quantised if fits and not set(KEPT) & set(targets[name].split(".")) else "F32"
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        plan[stored] = StoredTensor(kind, shape, 0, math.prod(shape) // values * size)
    return plan


def _write(
    folder: Path, source: TensorSource, plan: dict[str, StoredTensor], progress: Callable[[float], None]
) -> None:
    """Write a folder under a temporary name, and rename it when its content is on the disk. Raises OSError."""
    part = folder.with_suffix(".part")
    part.mkdir(mode=0o700)
    try:
        index = _write_file(part / FILE, source, plan, progress)
        write_index(part, folder / FILE, (part / FILE).stat(), index)
        written = (part / FILE).stat().st_mtime_ns
        os.utime(part / GGUF_INDEX, ns=(written, written))
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_file(
    path: Path, source: TensorSource, plan: dict[str, StoredTensor], progress: Callable[[float], None]
) -> dict[str, StoredTensor]:
    """Write the GGUF file in blocks of rows. Return its tensors, with their offsets."""
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    total, free = sum(tensor.num_bytes for tensor in plan.values()), shutil.disk_usage(path.parent).free
    if free < total + HEADER_BYTES:
        needed = f"the file takes {total / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free"
        raise OSError(errno.ENOSPC, needed)
    writer, done = GGUFWriter(path, "cacheblend"), 0
    for name, tensor in plan.items():
        kind, byte_shape = GGMLQuantizationType[tensor.kind], (*tensor.shape[:-1], tensor.row_bytes)
        writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), tensor.num_bytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        stream, index = writer.fout[0], dict[str, StoredTensor]()
        writer.write_padding(stream, stream.tell())
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for name, tensor in plan.items():
                index[name] = replace(tensor, offset=stream.tell())
                to_blocks = partial(quantize, qtype=GGMLQuantizationType[tensor.kind])
                for rows in _rows(source, name, tensor.shape):
                    parts = (part for part in np.array_split(rows, torch.get_num_threads()) if len(part))
                    done += sum(stream.write(blocks.data) for blocks in pool.map(to_blocks, parts))
                    progress(done / total)
                writer.write_padding(stream, tensor.num_bytes)
        stream.flush()
        os.fsync(stream.fileno())
    finally:
        writer.close()
    return index


def _rows(source: TensorSource, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a tensor in float32, in blocks of rows."""
    step = max(1, source.block_bytes // (4 * max(1, math.prod(shape[1:]))))
    for start in range(0, shape[0], step):
        yield source.read(name, start, min(shape[0], start + step)).float().contiguous().numpy()
