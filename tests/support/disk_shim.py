"""Build disk_shim.c, run Python under it, and read what it recorded."""

from __future__ import annotations

import enum
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<IIQqQ")
SUPPORT = Path(__file__).parent


class Call(enum.IntEnum):
    WRITE = 1  # about to write `data` at `offset` of `inode`
    DURABLE = 2  # the write at `offset` just before was synchronous, and has returned
    SYNC = 3
    TRUNCATE = 4  # to `offset` bytes
    CREATE = 5
    MKDIR = 6
    RENAME = 7  # data: the old path
    UNLINK = 8
    NOTE = 9  # offset: the process's own number


class Fault(enum.IntEnum):
    FAIL_IO = 1
    FAIL_SPACE = 2
    SHORT = 3  # half of a write is done
    KILL = 4
    FAIL_AFTER = 5  # done, and EIO returned


@dataclass(frozen=True)
class Event:
    call: Call
    path: str
    inode: int
    offset: int
    data: bytes


def build(folder: Path) -> Path:
    """Build the shared object. Skips the test on a system without a C compiler or preloading."""
    import pytest

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    target = folder / "disk_shim.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(target), str(SUPPORT / "disk_shim.c"), "-lpthread"], check=True
    )
    return target


def run(
    shim: Path, root: Path, code: str, *arguments: str, log: Path | None = None, fault: str = "", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python -c code arguments`, recording its file calls under `root` to `log`."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(shim, root, log, fault),
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def environment(shim: Path, root: Path, log: Path | None = None, fault: str = "") -> dict[str, str]:
    """fault: "countdown:kind:sticky"."""
    added = {"LD_PRELOAD": str(shim), "SHIM_ROOT": str(root.resolve()), "PYTHONDONTWRITEBYTECODE": "1"}
    added["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    if log is not None:
        added["SHIM_LOG"] = str(log)
    if fault:
        added["SHIM_FAULT"] = fault
    return {**os.environ, **added}


def read_log(log: Path) -> list[Event]:
    data, at, events = log.read_bytes(), 0, []
    while at < len(data):
        call, path_length, inode, offset, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        path = data[at : at + path_length].decode()
        at += path_length
        events.append(Event(Call(call), path, inode, offset, data[at : at + length]))
        at += length
    return events
