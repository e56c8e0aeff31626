"""GGUF files whose header promises more than they hold, or than a model has, are refused before anything is made of
it."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from gguf_files import write_gguf

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.gguf_files import reader
from cacheblend_cli.model.locate import resolve_model

STRING, ARRAY, UINT32, UINT8 = 8, 9, 4, 0


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def file_of(*keys: bytes, num_tensors: int = 0, num_keys: int | None = None) -> bytes:
    count = len(keys) if num_keys is None else num_keys
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, count) + b"".join(keys)


NUMBERS = b"".join(key(b"k%d" % i, UINT32, bytes(4)) for i in range(2000))
NESTED = struct.pack("<IQ", ARRAY, 1) * 100 + struct.pack("<IQ", UINT32, 0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (file_of(num_keys=2**64 - 1), "18,446,744,073,709,551,615 keys"),
        (file_of(NUMBERS, num_keys=2000), "2,000 keys; the limit is 1,024"),
        (file_of(num_tensors=2**63), "9,223,372,036,854,775,808 tensors"),
        (file_of(num_tensors=10**7), "10,000,000 tensors; the limit is 65,536"),
        (file_of(num_tensors=1), "inside its header"),
        (file_of(key(b"a", ARRAY, struct.pack("<IQ", UINT32, 2**63))), "9,223,372,036,854,775,808 values"),
        (file_of(key(b"a", ARRAY, struct.pack("<IQ", UINT8, 4_000_000))), "inside its header"),
        (file_of(key(b"a", ARRAY, struct.pack("<IQ", STRING, 4_000_000))), "inside its header"),
        (file_of(key(b"a", ARRAY, NESTED)), "array of arrays"),
        (file_of(key(b"a", STRING, struct.pack("<Q", 2**63) + b"x")), "inside its header"),
        (file_of(struct.pack("<Q", 2**64 - 30) + b"x" * 40, num_keys=1), "inside its header"),
        (file_of(), "unknown architecture None"),
        (file_of(key(b"general.architecture", STRING, text(b"llama"))), "lacks llama."),
        (file_of(key(b"general.architecture", STRING, text(b"qwen35"))), "unknown architecture"),
    ],
)
def test_a_header_that_promises_too_much(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        resolve_model(str(tmp_path / "m.gguf"))
    assert told in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"block_count": 10**6}, r"llama\.block_count = 1000000: the file has \d+ tensors"),
        ({"block_count": 2**32 - 1}, r"must be a whole number from 1 to 2147483647"),
        ({"embedding_length": 2**31 - 1}, "hidden_size 2,147,483,647"),
        ({"feed_forward_length": 2**31 - 1}, "intermediate_size 2,147,483,647"),
        ({"attention.head_count": 2**30}, "num_attention_heads in config.json is 1073741824"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base = nan"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": float("nan")}, "factor = nan"),
        ({"rope.freq_base": float("inf")}, "rope.freq_base = inf"),
    ],
)
def test_numbers_beyond_what_the_file_holds(tmp_path: Path, extra: dict[str, Any], told: str) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "F16", extra=extra)
    with pytest.raises(UsageError, match=told) as refused:
        read_spec(resolve_model(str(tmp_path / "m.gguf")))
    assert refused.value.hint


def test_values_of_all_arrays_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_ITEMS", 150)
    array = struct.pack("<IQ", UINT8, 100) + bytes(100)
    (tmp_path / "m.gguf").write_bytes(file_of(key(b"a", ARRAY, array), key(b"b", ARRAY, array)))
    with pytest.raises(UsageError, match="its arrays have 200 values; the limit is 150"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match=r"m\.gguf is not a readable GGUF file: it is not a regular file"):
        resolve_model(str(tmp_path))
