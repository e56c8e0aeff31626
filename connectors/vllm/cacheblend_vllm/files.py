"""Hand-overs that cacheblend writes: a prompt's KV in a safetensors file, which the connector loads."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from cacheblend_store.private_files import open_file
from torch import Tensor

from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.kv.export import KVReader
from cacheblend_vllm.handover import DTYPES, digest_of

SUFFIX = ".safetensors"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HandOverDirectory:
    """Hand-overs in progress. A file is locked while its producer lives; files of dead producers are removed here.
    Raises UsageError for a directory that cannot be written, or that others can read: it holds KV of all tenants."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
        except OSError as error:
            raise UsageError(
                f"{path} cannot be used for hand-overs: {error.strerror}",
                "name another one: --decoder vllm:URL,DIRECTORY",
            ) from error
        if found.st_uid != os.getuid() or found.st_mode & 0o007:
            raise UsageError(
                f"{path} is open to other users", "remove it, or name another one: --decoder vllm:URL,DIRECTORY"
            )
        for file in path.glob(f"*{SUFFIX}*"):
            _remove_dead(file)

    def new(self) -> HandOverFile:
        return HandOverFile(self.path, secrets.token_hex(16))

    def find(self, name: str) -> Path | None:
        """Return the file of a hand-over in progress, None for an unknown name."""
        file = self.path / f"{name}{SUFFIX}"
        return file if len(name) == 32 and name.isalnum() and file.is_file() else None


class HandOverFile:
    """The connector of one prompt. `params` go into vLLM's request; call `remove` when the request has ended."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name, self._path = name, directory / f"{name}{SUFFIX}"
        self._lock: int | None = None
        self.params: dict[str, Any] = {}

    def hand_over(self, token_ids: Sequence[int], kv: KVReader) -> None:
        """Write the file layer by layer. Raises DeviceError if there is no space."""
        new = self._path.with_name(f"{self._path.name}.new")
        digest = digest_of(token_ids)
        try:
            self._lock = open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, anywhere=True)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            with os.fdopen(os.dup(self._lock), "wb") as file:
                file.write(_header(kv, digest))
                for layer in kv:
                    for part in (layer.k, layer.v):
                        file.write(_bytes(part))
            new.rename(self._path)
        except OSError as error:
            new.unlink(missing_ok=True)
            self.remove()
            raise DeviceError(
                f"the prompt's KV cannot be written to {self._path.parent}: {error.strerror}",
                "make room there, or name another directory: --decoder vllm:URL,DIRECTORY",
            ) from error
        self.params = {"cacheblend": {"id": self.name, "num_tokens": len(token_ids), "digest": digest}}

    def remove(self) -> None:
        """Remove the file. A reader that has it open can still read it."""
        self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _header(kv: KVReader, digest: str) -> bytes:
    """Return length and JSON of a safetensors file: k.N and v.N of layer N, [num_tokens, num_kv_heads, head_dim]."""
    assert kv.start == 0, "no block is freed before an answer begins"
    spec, dtype = kv.decoder.spec, kv.decoder.dtype
    shape = [kv.num_tokens, spec.num_kv_heads, spec.head_dim]
    size = shape[0] * shape[1] * shape[2] * dtype.itemsize
    names = [f"{kind}.{layer}" for layer in range(kv.num_layers) for kind in "kv"]
    tensors = {
        name: {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps({"__metadata__": {"digest": digest}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(heads: Tensor) -> memoryview:
    return heads.contiguous().cpu().view(torch.uint8).flatten().numpy().data


def _remove_dead(file: Path) -> None:
    """Remove the file unless a living process holds its lock."""
    with suppress(OSError):
        held = open_file(file, os.O_RDWR, anywhere=True)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink(missing_ok=True)
        finally:
            os.close(held)
