"""Every write, sync and rename failing in turn: an operation happens whole or not at all, and says what went wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from disk_shim import SUPPORT, Fault, build, environment
from ledger import Ledger
from small_chunks import make_chunk

OPERATIONS = ("put", "replace", "evict", "remove", "document", "forget", "compact", "salvage", "create")
EXPECTED = {
    Fault.FAIL_IO: {"StoreIOError"},
    Fault.FAIL_AFTER: {"StoreIOError"},
    Fault.FAIL_SPACE: {"StoreNoSpace"},
    Fault.SHORT: {"StoreIOError", "StoreNoSpace"},
    Fault.KILL: {"killed"},
}
FAST = [("put", fault, False) for fault in Fault] + [("put", Fault.FAIL_SPACE, True), ("compact", Fault.FAIL_IO, False)]
FAST += [("compact", Fault.KILL, False), ("create", Fault.FAIL_IO, False)]
ALL = [(o, fault, sticky) for o in OPERATIONS for fault in Fault for sticky in (False, True)]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("cases", [FAST, pytest.param(ALL, marks=pytest.mark.torture)], ids=["fast", "all"])
def test_a_failed_call_leaves_the_old_or_the_new(
    tmp_path: Path, shim: Path, cases: list[tuple[str, Fault, bool]], ledger: Ledger
) -> None:
    totals = Counter[str]()
    for number, (operation, fault, sticky) in enumerate(cases):
        root = tmp_path / str(number)
        root.mkdir()
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "fault_worker.py"), str(root), operation, str(int(fault)), str(int(sticky))],
            env=environment(shim, root), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        where = f"{operation} with {fault.name}, {'from there on' if sticky else 'once'}"
        assert len(lines) >= 5, where  # calls that can fail
        for line in lines:
            assert line["state"] in ("old", "new"), (where, line)
            assert line["again"] == "", (where, line)
            if line["error"]:
                assert line["error"] in EXPECTED[fault], (where, line)
                assert fault == Fault.KILL or line["hint"], (where, line)
            elif operation in ("put", "replace", "remove", "document", "forget"):
                assert line["state"] == "new", (where, line)  # a call whose failure does no harm
            totals[fault.name.lower()] += 1
        assert sum(bool(line["error"]) for line in lines) >= 3 or fault == Fault.SHORT, where
    ledger.add("failed calls of an operation", operations=len({o for o, _, _ in cases}), not_atomic=0, **totals)


CLI = "from cacheblend_cli.cli.main import main; main()"


@pytest.mark.parametrize(
    ("command", "fault", "call"),
    [
        (("prune", "--orphans"), Fault.FAIL_IO, 2),
        (("prune", "--orphans"), Fault.FAIL_SPACE, 4),
        (("compact",), Fault.SHORT, 2),
        (("compact",), Fault.FAIL_SPACE, 4),
    ],
    ids=["prune, input/output", "prune, no space", "compact, short", "compact, no space"],
)
def test_a_command_names_the_disk_and_exits_with_4(
    tmp_path: Path, shim: Path, command: tuple[str, ...], fault: Fault, call: int
) -> None:
    path = tmp_path / "store"
    with ChunkStore.open(path, mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in range(6)])
    done = subprocess.run(
        [sys.executable, "-c", CLI, "chunks", *command, "--store", str(path)],
        env=environment(shim, tmp_path, fault=f"{call}:{int(fault)}:1"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    with ChunkStore.open(path) as store:
        chunks = len(list(store.chunks()))
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert str(path) in done.stderr, done.stderr
    assert chunks == 6
