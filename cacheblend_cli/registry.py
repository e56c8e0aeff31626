"""Registry of this user's engines: a file for each, in the directory for run-time files. Imports neither torch nor
numpy."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec
from cacheblend_store import private_files
from cacheblend_store.conversion import convert

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.named import default_model
from cacheblend_cli.settings import Settings
from cacheblend_cli.sockets import make_folder, own_folder
from cacheblend_cli.version import __version__

_MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class EngineRecord:
    """An engine, as it registered itself when it began to listen."""

    pid: int
    process: str  # boot and start time: a later process with this id has others
    socket: str
    store: str
    model: str
    version: str

    @property
    def is_alive(self) -> bool:
        return bool(self.process) and process_of(self.pid) == self.process


def process_of(pid: int) -> str:
    """Return the boot and start time of a process; "" if it has ended, or on a system without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{boot}:{fields[18]}"


def register(socket: Path, settings: Settings, pid: int | None = None) -> Callable[[], None]:
    """Register a process, by default this one, as the engine that listens at a socket. Return a function that undoes
    it. Where nothing can be written, the engine is not registered: it is found beside its store only."""
    pid = os.getpid() if pid is None else pid
    store, model = os.path.realpath(settings.store_path), settings.model or default_model()
    record = EngineRecord(pid, process_of(pid), str(socket), store, PurePath(model).name, __version__)
    path = _folder() / f"{pid}.json"
    if record.process:
        with suppress(OSError, UsageError):
            make_folder(path.parent)
            private_files.replace(path, msgspec.json.encode(record))

    def remove() -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)

    return remove


def records() -> list[EngineRecord]:
    """Return the registered engines. Removes files of engines that have ended."""
    found: list[EngineRecord] = []
    if not os.path.isdir(_folder()):  # False also without permission, unlike Path.is_dir
        return found
    with suppress(OSError, UsageError):
        make_folder(_folder())  # checks it
        for path in _folder().glob("*.json"):
            with suppress(OSError, ValueError, RecursionError):
                record = convert(msgspec.json.decode(private_files.read_bytes(path, _MOST_BYTES)), EngineRecord)
                if record.is_alive:
                    found.append(record)
                else:
                    path.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.pid)


def _folder() -> Path:
    return own_folder() / "engines"
