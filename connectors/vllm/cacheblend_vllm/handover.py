"""Prompts handed over by cacheblend: what a request says of one, and its KV in a file or behind a URL.

The KV is a safetensors file: `k.N` (rotated) and `v.N` of layer N, each [num_tokens, num_kv_heads, head_dim].
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import urllib.request
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "cacheblend"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_HEADER = 16 << 20
TIMEOUT_S = 30.0
_ID = re.compile("[0-9a-f]{32}")


class HandOverError(Exception):
    """KV that cannot be loaded: the prompt has to be computed."""


@dataclass(frozen=True)
class HandOver:
    """A request's kv_transfer_params. digest: of the prompt's token ids, see `digest_of`."""

    id: str
    num_tokens: int
    digest: str

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> HandOver | None:
        """Return the hand-over of a request; None if there is none, or not a well-formed one."""
        found = (params or {}).get(NAME)
        if not isinstance(found, Mapping):
            return None
        name, count, digest = found.get("id"), found.get("num_tokens"), found.get("digest")
        if not (isinstance(name, str) and _ID.fullmatch(name) and isinstance(count, int) and isinstance(digest, str)):
            return None
        return cls(name, count, digest)

    def is_of(self, prompt_ids: Sequence[int] | None) -> bool:
        """Return whether the KV is that of this prompt."""
        return prompt_ids is not None and len(prompt_ids) == self.num_tokens and digest_of(prompt_ids) == self.digest


def digest_of(token_ids: Sequence[int]) -> str:
    """Return blake2b-128 of the ids as little-endian int64, hex."""
    ids = array("q", token_ids)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()


Read = Callable[[int, int], bytearray | memoryview]
"""Returns writable bytes start to end of a hand-over. Raises OSError, or HandOverError if there are fewer."""


def file_reader(path: Path) -> Read:
    """Map a file. It stays readable after the producer has removed it."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read(start: int, end: int) -> memoryview:
        if end > len(mapped):
            raise HandOverError(f"the file has {len(mapped)} bytes; {end} are expected")
        return memoryview(mapped)[start:end]

    return read


def read_url(url: str, start: int, end: int) -> bytearray:
    """Read by one HTTP range request."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{end - 1}"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        if reply.status != 206:
            raise HandOverError(f"the server answers {reply.status} to a range request")
        data = bytearray(reply.read(end - start + 1))
    if len(data) != end - start:
        raise HandOverError(f"{len(data)} of {end - start} bytes arrived")
    return data


class HandOverSource:
    """Location of hand-overs: a directory of this host, or the URL of a cacheblend server."""

    def __init__(self, directory: str | None, url: str | None) -> None:
        if (directory is None) == (url is None):
            raise ValueError("kv_connector_extra_config needs either directory or url")
        self._directory, self._url = directory, url

    def has(self, name: str) -> bool:
        """Return whether it is worth trying to load it. A URL is not asked."""
        return self._directory is None or self._file(name).is_file()

    def open(self, hand_over: HandOver) -> KVFile:
        """Open a hand-over. Raises OSError or HandOverError."""
        if self._directory is not None:
            return KVFile(file_reader(self._file(hand_over.id)), hand_over)
        return KVFile(partial(read_url, f"{str(self._url).rstrip('/')}/handovers/{hand_over.id}"), hand_over)

    def _file(self, name: str) -> Path:
        return Path(str(self._directory)) / f"{name}.safetensors"


class KVFile:
    """K and V of a hand-over. Raises HandOverError for another prompt's file, and for a file of another format."""

    def __init__(self, read: Read, hand_over: HandOver) -> None:
        self._read = read
        size = int.from_bytes(read(0, 8), "little")
        if size > MAX_HEADER:
            raise HandOverError("the file is not a hand-over")
        try:
            header = json.loads(bytes(read(8, 8 + size)))
            own = header.pop("__metadata__")["digest"]
        except (ValueError, KeyError, TypeError) as error:
            raise HandOverError(f"the file's header cannot be read: {error}") from error
        if own != hand_over.digest:
            raise HandOverError("the file is of another prompt")
        self._tensors, self._start = header, 8 + size

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return K and V of positions start to end of a layer, [end - start, num_kv_heads, head_dim]."""
        return self._rows(f"k.{layer}", start, end), self._rows(f"v.{layer}", start, end)

    def _rows(self, name: str, start: int, end: int) -> Tensor:
        entry = self._tensors.get(name)
        if entry is None or entry["dtype"] not in DTYPES or not 0 <= start < end <= entry["shape"][0]:
            raise HandOverError(f"the file lacks positions {start} to {end} of {name}")
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        row = math.prod(shape[1:]) * dtype.itemsize
        first = self._start + entry["data_offsets"][0]
        data = self._read(first + start * row, first + end * row)
        return torch.frombuffer(data, dtype=dtype).view(end - start, *shape[1:])
