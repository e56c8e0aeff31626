"""Run under disk_shim.so: let each write, sync and rename of an operation fail in turn, and report the result.

    python fault_worker.py FOLDER OPERATION FAULT STICKY

Prints one JSON line per failed call: {call, error, message, hint, state: "old" | "new" | "torn ...", again: "" or what
failed}.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from cacheblend_store import ChunkStore, compact, salvage, verify
from disk_shim import Fault
from small_chunks import Contents, Operation, read_contents

START = [
    Operation("put", (0, 1, 2, 3, 4, 5), 1),
    Operation("document", (0, 1, 2), source="0/a.md"),
    Operation("document", (2, 3), source="0/b.md"),
    Operation("remove", (5,)),
]
OPERATIONS = {
    "put": Operation("put", (6, 7, 8), 1),
    "replace": Operation("put", (1, 2), 2),
    "evict": Operation("evict", (1, 2, 4)),
    "remove": Operation("remove", (1, 2, 4)),
    "document": Operation("document", (2, 4), source="0/a.md"),
    "forget": Operation("forget", source="0/a.md"),
}
shim = ctypes.CDLL(None)


def main(folder: Path, name: str, fault: Fault, sticky: bool) -> None:
    path, saved, old = folder / "store", folder / "saved", Contents()
    with ChunkStore.open(saved, mode="write") as store:
        for step in START:
            step.perform(store)
            old = step.expect(old)
    new = OPERATIONS[name].expect(old) if name in OPERATIONS else old
    call = 0
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if name == "create":
            old = new = Contents()
        else:
            shutil.copytree(saved, path)
        attempt = _killed if fault == Fault.KILL else _failed
        line = attempt(path, name, old, new, call, fault, sticky)
        if line is None:
            return
        print(json.dumps({"call": call, **line}), flush=True)
        call += 1


def _perform(path: Path, name: str, store: ChunkStore | None) -> ChunkStore:
    if name == "create":
        return ChunkStore.open(path, mode="write", lock_timeout=2)
    if name == "salvage":
        salvage(path, lock_timeout=2)
        return ChunkStore.open(path, mode="write", lock_timeout=2)
    assert store is not None
    if name == "compact":
        compact(store)
    else:
        OPERATIONS[name].perform(store)
    return store


def _opened(path: Path, name: str) -> ChunkStore | None:
    return None if name in ("create", "salvage") else ChunkStore.open(path, mode="write", lock_timeout=2)


def _failed(
    path: Path, name: str, old: Contents, new: Contents, call: int, fault: Fault, sticky: bool
) -> dict[str, str] | None:
    line = {"error": "", "message": "", "hint": ""}
    store = _opened(path, name)
    shim.shim_arm(call, int(fault), int(sticky))
    try:
        store = _perform(path, name, store)
    except Exception as error:
        line = {"error": type(error).__name__, "message": str(error), "hint": str(getattr(error, "hint", ""))}
    fired = shim.shim_fired()
    shim.shim_arm(-1, 0, 0)
    if not fired:
        assert not line["error"], line
        if store is not None:
            store.close()
        return None
    line["state"] = _attempt(lambda: _state(path, store, old, new))
    line["again"] = _attempt(lambda: _again(path, name, store, new))
    return line


def _killed(
    path: Path, name: str, old: Contents, new: Contents, call: int, fault: Fault, sticky: bool
) -> dict[str, str] | None:
    pid = os.fork()
    if pid == 0:
        store = _opened(path, name)
        shim.shim_arm(call, int(fault), int(sticky))
        _perform(path, name, store)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        assert status == 0, status
        return None
    line = {"error": "killed", "state": _attempt(lambda: _state(path, None, old, new))}
    return {**line, "again": _attempt(lambda: _again(path, name, _opened(path, name), new))}


def _state(path: Path, store: ChunkStore | None, old: Contents, new: Contents) -> str:
    """As the process that failed sees it, or one that opens the store anew."""
    seen = Contents()
    if store is not None:
        seen = read_contents(store)
    elif (path / "data.mdb").exists():
        with ChunkStore.open(path, lock_timeout=2) as fresh:
            seen = read_contents(fresh)
    if seen not in (old, new):
        return f"torn: {seen}"
    return "old" if seen == old else "new"


def _again(path: Path, name: str, store: ChunkStore | None, new: Contents) -> str:
    """The same operation on a disk that works again: "" when it succeeds and leaves a sound store."""
    if name in ("create", "salvage") and store is not None:
        store.close()
    store = _perform(path, name, store)
    if name not in OPERATIONS:
        Operation("put", (9,)).perform(store)
        new = Operation("put", (9,)).expect(new)
    report = verify(store)
    found = read_contents(store)
    rest = sorted(
        {f.name for f in path.iterdir()} - {"data.mdb", "lock.mdb", "writer.lock", "open.lock", "reserve.tmp"}
    )
    store.close()
    if not report.ok or found != new or rest:
        return f"{report.findings[:2]} {found} {rest}"
    return ""


def _attempt(work: Callable[[], str]) -> str:
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Fault(int(sys.argv[3])), sys.argv[4] == "1")
