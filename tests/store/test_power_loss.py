"""Power cut at any moment: whatever the disk kept of unsynced writes, all that was acknowledged reads."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, StoreError, StoreNotFound, verify
from children import Ended, outcomes
from disk_images import POLICIES, Disk, cuts, lay_out
from disk_shim import Call, Event, build, read_log, run
from ledger import Ledger
from small_chunks import Contents, operation, read_contents

NUM_OPERATIONS = 60
WORKLOAD = f"""
import ctypes, sys
import lmdb
from cacheblend_store import ChunkStore, compact
from small_chunks import operation
path, sync = sys.argv[1], sys.argv[2] == "sync"
note = lambda number: ctypes.CDLL(None).shim_note(ctypes.c_int64(number))
if not sync:
    opened = lmdb.open
    lmdb.open = lambda *a, **k: opened(*a, **{{**k, "sync": False, "metasync": False}})
with ChunkStore.open(path, mode="write") as store:
    note(0)
    for number in range({NUM_OPERATIONS}):
        operation(1, number).perform(store)
        if sync and number % 25 == 24:
            compact(store)
        note(number + 1)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim"))


def _record(shim: Path, folder: Path, sync: str) -> tuple[Path, list[Event]]:
    root, log = folder / f"disk-{sync}", folder / f"{sync}.log"
    root.mkdir()
    done = run(shim, root, WORKLOAD, str(root / "data" / "store"), sync, log=log)
    assert done.returncode == 0, done.stderr
    events = read_log(log)
    assert [e.offset for e in events if e.call == Call.NOTE] == list(range(NUM_OPERATIONS + 1))
    return root, events


def _states() -> list[Contents]:
    """Contents after each number of operations."""
    states = [Contents()]
    for number in range(NUM_OPERATIONS + 1):
        states.append(operation(1, number).expect(states[-1]))
    return states


def _checker(root: Path, events: list[Event], target: Path, seed: int) -> Callable[[tuple[int, int]], str]:
    """A function from (number of the image, cut) to "good" or what is wrong with it. Cuts come in order."""
    states, disk, followed, acknowledged = _states(), Disk(root), 0, -1

    def work(item: tuple[int, int]) -> str:
        nonlocal followed, acknowledged
        number, cut = item
        for event in events[followed:cut]:
            disk.follow(event)
            acknowledged = event.offset if event.call == Call.NOTE else acknowledged
        followed = cut
        rng = random.Random(f"{seed} {number}")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        lay_out(*disk.image(rng, POLICIES[number % len(POLICIES)]), target)
        wanted = states[acknowledged : acknowledged + 2] if acknowledged >= 0 else states[:1]
        return _check(target / "data" / "store", wanted, exists=acknowledged >= 0, number=max(acknowledged, 0))

    return work


def _check(path: Path, wanted: list[Contents], *, exists: bool, number: int) -> str:
    try:
        with ChunkStore.open(path) as store:
            found = read_contents(store)
            report = verify(store)
    except StoreNotFound:
        if exists:
            return "the store is gone"
        found, report = wanted[0], None
    except (StoreError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    if found not in wanted:
        return f"lost or torn: {found} is none of {wanted}"
    if report is not None and not report.ok:
        return f"verify: {report.findings[:2]}"
    try:
        with ChunkStore.open(path, mode="write") as store:  # and it goes on from there
            step = operation(1, number)
            step.perform(store)
            return "good" if read_contents(store) == step.expect(found) else "writing on went wrong"
    except (StoreError, AssertionError) as error:
        return f"writing on: {type(error).__name__}: {error}"


def _cut(root: Path, events: list[Event], tmp_path: Path, num_images: int) -> Counter[str]:
    moments = cuts(events, num_images, random.Random(num_images))
    work = _checker(root, events, tmp_path / "image", seed=num_images)
    order = list(enumerate(moments))
    return Counter(
        str(outcome) if isinstance(outcome, Ended) else outcome for _, outcome in outcomes(work, order, timeout=60)
    )


@pytest.mark.parametrize("num_images", [32, pytest.param(2000, marks=pytest.mark.torture)])
def test_a_power_cut_loses_nothing_acknowledged(tmp_path: Path, shim: Path, num_images: int, ledger: Ledger) -> None:
    root, events = _record(shim, tmp_path, "sync")
    seen = _cut(root, events, tmp_path, num_images)
    assert seen == {"good": num_images}, [text[:300] for text in seen][:8]
    ledger.add("power loss", images=num_images, bad=0, calls_recorded=len(events), operations=NUM_OPERATIONS)


@pytest.mark.parametrize("num_images", [32, pytest.param(2000, marks=pytest.mark.torture)])
def test_the_harness_sees_what_unsynced_writes_do(tmp_path: Path, shim: Path, num_images: int, ledger: Ledger) -> None:
    """With LMDB's syncs off the same cuts must lose data, or the test above proves nothing."""
    root, events = _record(shim, tmp_path, "nosync")
    seen = _cut(root, events, tmp_path, num_images)
    bad = num_images - seen["good"]
    assert bad > num_images / 2, seen
    crashed = [text for text in seen if text.startswith(("signal", "exception", "no answer", "exit", "WrongData"))]
    assert not crashed, crashed[:5]  # and even such a file is refused, or read as far as it is right
    ledger.add("power loss with MDB_NOSYNC (must fail)", images=num_images, bad=bad, wrong_data=0, signals=0)
