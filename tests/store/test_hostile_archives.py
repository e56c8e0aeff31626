"""Nothing that was tampered with gets in: hostile tars, manifests that lie, random edits."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from archives import files_of, fill, write_tar
from cacheblend_store import (
    ArchiveError,
    ChunkStore,
    stats,
    verify,
)
from cacheblend_store.archive import (
    ArchiveOptions,
    export_chunks,
    import_chunks,
)
from children import Ended, limit_memory, outcomes
from mutations import mutate
from torture import Ledger


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "x.tar"


def tar_with(path: Path, add: Callable[[tarfile.TarFile], None]) -> None:
    with tarfile.open(path, "a", format=tarfile.GNU_FORMAT) as tar:
        add(tar)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
        tar.addfile(info, io.BytesIO(b"x"))

    return add


ID = "ab" * 20 + ".safetensors"


@pytest.mark.parametrize(
    "add",
    [
        member("../evil"), member("/etc/passwd"), member("a/../../b"), member("sub/" + ID), member("notes.txt"), member(ID),
        member("manifest.jsonl"), member(ID, tarfile.SYMTYPE, "/etc/passwd"), member(ID, tarfile.LNKTYPE, "manifest.jsonl"),
        member(ID, tarfile.CHRTYPE), member(ID, tarfile.BLKTYPE), member(ID, tarfile.FIFOTYPE), member("sub", tarfile.DIRTYPE),
        member("x" * 150), member(ID, tarfile.GNUTYPE_SPARSE), member(ID, b"x"),
    ],
)  # fmt: skip
def test_hostile_tar_members(tmp_path: Path, add: Callable[[tarfile.TarFile], None]) -> None:
    with fill(tmp_path / "a") as store:
        export_chunks(store, tmp_path / "x.tar")
    tar_with(tmp_path / "x.tar", add)
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        with pytest.raises(ArchiveError):
            import_chunks(other, tmp_path / "x.tar")
        assert stats(other).chunks == 0
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "x.tar"}


def test_limits(tmp_path: Path, archive: Path) -> None:
    with fill(tmp_path / "a") as store:
        size = export_chunks(store, archive).num_bytes
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        for limits in (ArchiveOptions(max_entries=5), ArchiveOptions(max_bytes=size)):
            with pytest.raises(ArchiveError, match="more than"):
                import_chunks(other, archive, options=limits)
        assert import_chunks(other, archive, options=ArchiveOptions(max_entries=6, max_bytes=size + 20_000)).chunks == {
            "new": 5
        }


def lies() -> dict[str, Callable[[dict[str, Any]], object]]:
    """What a changed manifest can say of a chunk."""

    def of_chunk(**changes: object) -> Callable[[dict[str, Any]], object]:
        return lambda line: line["manifest"].update(changes)

    return {
        "tokens": of_chunk(token_ids=[1, 2, 3, 4, 5]),
        "id": of_chunk(key=base64.b64encode(b"\xab" * 20).decode()),
        "model": of_chunk(model="other"),
        "shape": of_chunk(head_dim=4, num_kv_heads=4),
        "more layers": of_chunk(num_layers=4),
        "huge": of_chunk(num_layers=1024, num_kv_heads=4096, head_dim=65536),
        "negative": of_chunk(num_layers=-1),
        "codec": of_chunk(codec="pickle"),
        "left": of_chunk(left_context_ids=[1]),
        "collection": of_chunk(collection="ab" * 20),
        "length": of_chunk(collected_len=6),
        "prefix": of_chunk(context="prefix"),
        "token": of_chunk(token_ids=[1, 2, 3, 4, 1 << 40]),
        "type": of_chunk(text=5),
        "field": lambda line: line.update(extra="x"),
        "created": of_chunk(created=float("nan")),
        "blobs": of_chunk(blob_sizes=[1, 1, 1]),
        "missing": lambda line: line["manifest"].pop("span"),
        "digest": lambda line: line.update(sha256="zz"),
        "file": lambda line: line.update(file="ab" * 20 + ".safetensors"),
    }


@pytest.fixture
def changed_manifest(tmp_path: Path, archive: Path) -> Iterator[Callable[[Callable[[list[bytes]], list[bytes]]], None]]:
    """Changes the lines of an export's manifest, which is then refused."""

    def change(changed: Callable[[list[bytes]], list[bytes]]) -> None:
        with fill(tmp_path / "a") as store:
            export_chunks(store, archive)
        files = files_of(archive)
        lines = changed(files["manifest.jsonl"].splitlines(keepends=True))
        write_tar(archive, {**files, "manifest.jsonl": b"".join(lines)})

    yield change
    with ChunkStore.open(tmp_path / "b", mode="write") as other:
        with pytest.raises(ArchiveError):
            import_chunks(other, archive)
        assert stats(other).chunks == 0


@pytest.mark.parametrize("lie", list(lies()))
def test_a_manifest_that_lies(changed_manifest: Any, lie: str) -> None:
    def changed(lines: list[bytes]) -> list[bytes]:
        records = [json.loads(line) for line in lines]
        lies()[lie](next(r for r in records if r["type"] == "chunk" and r["manifest"]["context"] == "sink"))
        return [json.dumps(r).encode() + b"\n" for r in records]

    changed_manifest(changed)


@pytest.mark.parametrize("lines", [slice(0, -1), slice(1, None), slice(0, 3), slice(0, 0), slice(None, None, -1)])
def test_a_manifest_that_lacks_lines(changed_manifest: Any, lines: slice) -> None:
    changed_manifest(lambda whole: whole[lines])


CASES = 50  # a store


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.torture)])
def test_fuzzed_archives(tmp_path: Path, count: int, ledger: Ledger) -> None:
    """Edited tars and manifests: taken in right, rejected or refused; no crash, no hang, little memory."""
    with fill(tmp_path / "a") as store:
        export_chunks(store, tmp_path / "x.tar")
        truth = {m.key: m for m in store.chunks(prefixes=True)}
    whole, files = (tmp_path / "x.tar").read_bytes(), files_of(tmp_path / "x.tar")

    def work(first: int) -> dict[str, float]:
        seen, slowest = Counter[str](), 0.0
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        with ChunkStore.open(tmp_path / "b", mode="write") as other:
            limit_memory()
            for number in range(first, first + CASES):
                target, rng = tmp_path / "fuzzed.tar", random.Random(number)
                if number % 2:
                    target.write_bytes(mutate(rng, whole))
                else:
                    write_tar(target, {**files, "manifest.jsonl": mutate(rng, files["manifest.jsonl"])})
                start = time.process_time()
                try:
                    taken = import_chunks(other, target)
                    seen["rejected" if "rejected" in taken.chunks else "taken"] += 1
                except ArchiveError:
                    seen["refused"] += 1
                slowest = max(slowest, time.process_time() - start)
            for manifest in other.chunks(prefixes=True):
                real = truth[manifest.key]
                assert manifest.token_ids == real.token_ids
                assert manifest.blob_digests == real.blob_digests
            assert verify(other).ok
        return {**seen, "slowest": slowest}

    totals, slowest = Counter[str](), 0.0
    for first, outcome in outcomes(work, range(0, count, CASES), timeout=120):
        assert not isinstance(outcome, Ended), (first, outcome)
        slowest = max(slowest, outcome.pop("slowest"))
        totals.update(outcome)
    assert sum(totals.values()) == count
    assert totals["refused"] > count / 2
    assert slowest < 1.0  # seconds of CPU to refuse one: a bound of the format, not of this machine
    ledger.add("fuzzed archives", cases=count, crashes=0, hangs=0, slowest_s=round(slowest, 4), **totals)
