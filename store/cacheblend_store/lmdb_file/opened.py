"""Stores open in this process: one environment per file, because LMDB forbids a second one in a process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from cacheblend_store.errors import StoreError
from cacheblend_store.lmdb_file.datafile import Fill, make_store
from cacheblend_store.lmdb_file.directory import DATA
from cacheblend_store.lmdb_file.environment import Environment

_shared: dict[str, Environment] = {}
_inherited: dict[str, Environment] = {}  # of the parent; kept, because LMDB closes environments on garbage collection
_registry = threading.RLock()


def acquire(store: Path, lock_timeout: float, fill: Fill) -> Environment:
    """Return the store's environment, opening or creating it if needed. The directory must have been checked."""
    with _registry:
        key = str(store.resolve())
        if key in _shared:
            _shared[key].users += 1
            return _shared[key]
        if key in _inherited:
            _close_inherited(key)
        if not (store / DATA).exists():
            make_store(store, lock_timeout, fill)
        _shared[key] = Environment(store, lock_timeout)
        return _shared[key]


def release(environment: Environment) -> None:
    """Undo one `acquire`; the last one closes the environment."""
    with _registry:
        if environment.pid != os.getpid():
            return
        environment.users -= 1
        if environment.users == 0:
            for key in [k for k, e in _shared.items() if e is environment]:
                del _shared[key]
            environment.close()


def _close_inherited(key: str) -> None:
    """Close an environment inherited by fork: py-lmdb opens a file once per process, and counts the inherited one."""
    if _inherited[key].transactions:
        raise StoreError(
            f"this process was forked while its parent read or wrote the store at {_inherited[key].store}",
            "fork while the store is idle, or start workers with spawn or forkserver",
        )
    _inherited.pop(key).close_lmdb()


def _forget_after_fork() -> None:
    global _registry
    _registry = threading.RLock()
    _inherited.update(_shared)
    _shared.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
