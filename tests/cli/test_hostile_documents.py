"""`precompute` of a folder with hostile files: each is reported with its reason and not stored, other files are."""

from __future__ import annotations

import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import files
import hostile
import pytest
from cacheblend_documents import conversion
from ledger import Ledger

Cli = Callable[..., Any]


BESIDE = "<p>An ordinary page beside {name}: Mara keeps the harbor.</p>"


def limit(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    limits = partial(conversion.Limits, seconds=seconds, seconds_per_mib=0)
    monkeypatch.setattr(conversion, "Limits", limits)


def test_a_hostile_file_is_named_and_nothing_of_it_is_stored(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 0.5)
    files.write(docs / "slow.html", "<div>" * 50_000 + "harbor")
    files.write(docs / "locked.pdf", hostile.PDFS["locked"]())
    done = cli("precompute", "docs", "-v")
    assert done.code == 0
    assert "slow.html: takes more than" in done.err
    assert "locked.pdf: a PDF with a password" in done.err
    sources = {record["source"] for record in cli("chunks", "ls", "--json").records}
    assert sources
    assert not any("slow" in source or "locked" in source for source in sources)


@contextmanager
def peak_of_converters() -> Iterator[Callable[[], int]]:
    """Peak resident memory (MiB) of this process's children."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            for task in Path("/proc/self/task").iterdir():
                with suppress(OSError, StopIteration):  # ended meanwhile
                    for child in (task / "children").read_text().split():
                        lines = Path(f"/proc/{child}/status").read_text().splitlines()
                        peak[0] = max(peak[0], int(next(x for x in lines if x.startswith("VmHWM:")).split()[1]) >> 10)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: peak[0]
    finally:
        done.set()
        watcher.join()


@pytest.mark.torture
def test_every_hostile_file_is_named_and_the_page_beside_it_is_stored(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder per hostile file; the same converter process reads an ordinary page after it."""
    limit(monkeypatch, 1)
    folder = tmp_path / "docs"
    for name, make in hostile.FILES.items():
        files.write(folder / name.replace(".", "-") / name, make())
    (folder / "sparse-md").mkdir()
    with (folder / "sparse-md" / "sparse.md").open("wb") as sparse:
        sparse.truncate(2 << 30)
    places = {place.parent.name: place for place in folder.glob("*/*")}
    for place in places.values():
        files.write(place.parent / "then.html", BESIDE.format(name=place.name))
    cli("precompute", str(places["media-xlsx"].parent))  # loads all that it needs
    grown, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrusage(resource.RUSAGE_CHILDREN)
    with peak_of_converters() as peak:
        done = cli("precompute", "docs", "-v", "--max-file-size", "64MB")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) >> 10
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.code == 0, done.err
    reasons = dict(re.findall(r"skipped docs/[^/]+/([^ /:]+): (.+)", done.err))
    assert sorted(reasons) == sorted(place.name for place in places.values())
    assert all(3 < len(reason) < 200 for reason in reasons.values()), reasons
    stored = {record["source"].partition("#")[0] for record in cli("chunks", "ls", "--json").records}
    assert stored == {f"docs/{folder}/then.html" for folder in places}
    assert peak() < 1024 + 8 * 64
    assert grown < 1024
    cpu_s = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    assert cpu_s < 3 * len(places)  # a second each, and the start of the next converter
    Ledger().add(
        "hostile documents",
        files=len(places),
        refused_by_name=len(reasons),
        stored=0,
        pages_beside_stored=len(stored),
        limit_s_of_cpu=1,
        cpu_s=round(cpu_s),
        peak_mib_of_a_converter=peak(),
        grown_mib=grown,
    )
