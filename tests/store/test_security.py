"""Permissions of a store, privacy of its files, and foreign files."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import lmdb
import pytest
from bare_store import bare_writing
from cacheblend_store import (
    BadBlob,
    ChunkStore,
    StoreCorrupt,
    StoreError,
    StoreFormat,
    StorePermission,
    compact,
    salvage,
    verify,
)
from cacheblend_store.format.blobs import blob_prefix, blob_spec, encode_blob
from cacheblend_store.lmdb_file.pages.reader import DATABASES
from one_blob import read_blob
from small_chunks import make_chunk

_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        store.put_chunk(*make_chunk(1))
    return tmp_path / "store"


def test_nobody_else_reads_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with ChunkStore.open(tmp_path / "store", mode="write") as store:
            store.put_chunk(*make_chunk(1))
            compact(store)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "store").iterdir()}
    assert "data.mdb" in modes
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize("part", ["", "data.mdb"])
def test_a_store_that_everyone_may_write_is_read_and_not_written(path: Path, part: str) -> None:
    (path / part).chmod(0o777 if not part else 0o666)
    with pytest.raises(StorePermission) as caught:
        ChunkStore.open(path, mode="write")
    assert f"chmod {'600' if part else '700'}" in str(caught.value.hint)
    with ChunkStore.open(path) as store:
        assert len(list(store.chunks())) == 1
    with ChunkStore.open(path, mode="write", force=True) as store:
        store.put_chunk(*make_chunk(2))


@_as_root
@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_file_of_somebody_else_in_our_folder_is_refused(path: Path, mode: Literal["read", "write"]) -> None:
    os.chown(path / "data.mdb", 12345, 12345)
    with pytest.raises(StorePermission, match="belongs to another user"):
        ChunkStore.open(path, mode=mode)


def test_somebody_elses_store_by_its_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    with pytest.raises(StorePermission):
        ChunkStore.open(path, mode="write")
    with ChunkStore.open(path) as store:
        assert len(list(store.chunks())) == 1


@_as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_nothing_is_created_in_a_store_of_another_user(path: Path, mode: int) -> None:
    """Also not by root, who could."""
    for file in (path, *path.iterdir()):
        os.chown(file, 12345, 12345)
    path.chmod(mode)
    for name in ("lock.mdb", "open.lock", "writer.lock"):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(path.parent / "victim")
    with ChunkStore.open(path) as store:
        assert not store.is_own
        assert len(list(store.chunks())) == 1
        assert verify(store).ok
    for write in (lambda: ChunkStore.open(path, mode="write"), lambda: salvage(path)):
        with pytest.raises(StorePermission, match=r"belongs to another user|writable by other users"):
            write()
    assert not (path.parent / "victim").exists()


@pytest.mark.parametrize("part", ["", "data.mdb"])
def test_a_store_that_a_group_may_write_is_read_and_not_written(path: Path, part: str) -> None:
    (path / part).chmod(0o770 if not part else 0o660)
    with pytest.raises(StorePermission, match="writable by other users") as caught:
        ChunkStore.open(path, mode="write")
    assert f"chmod {'600' if part else '700'} {path / part}" in str(caught.value.hint)
    with ChunkStore.open(path) as store:
        assert not store.is_own
        assert len(list(store.chunks())) == 1


def test_a_store_below_a_folder_that_everyone_may_write_is_not_written(path: Path) -> None:
    """They could exchange it. /tmp has the sticky bit, which prevents that."""
    path.parent.chmod(0o777)
    with pytest.raises(StorePermission, match="writable by every user") as caught:
        ChunkStore.open(path, mode="write")
    assert f"chmod o-w {path.parent}" in str(caught.value.hint)
    with ChunkStore.open(path) as store:
        assert not store.is_own
    path.parent.chmod(0o1777)
    with ChunkStore.open(path, mode="write") as store:
        assert store.is_own


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "open.lock", "writer.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO"])
def test_a_file_of_a_store_that_leads_elsewhere_is_refused(path: Path, name: str, kind: str) -> None:
    victim = path.parent / "victim"
    if kind == "link":
        victim.write_bytes((path / name).read_bytes())
    (path / name).unlink()
    os.mkfifo(path / name) if kind == "FIFO" else (path / name).symlink_to(victim)
    before = victim.read_bytes() if victim.exists() else None
    refused = pytest.raises(StorePermission, match=f"{name} is (a symbolic link|not a regular file)")
    with refused, ChunkStore.open(path, mode="write") as store:
        store.put_chunk(*make_chunk(2))
    assert (victim.read_bytes() if victim.exists() else None) == before


def test_leftovers_of_a_killed_writer_that_are_a_link_are_removed_and_not_followed(path: Path) -> None:
    (path.parent / "victim").mkdir()
    (path.parent / "victim" / "data.mdb").write_text("mine")
    (path / "making.tmp").symlink_to(path.parent / "victim")
    with ChunkStore.open(path, mode="write") as store:
        compact(store)
        assert len(list(store.chunks())) == 1
    assert (path.parent / "victim" / "data.mdb").read_text() == "mine"
    assert not (path / "making.tmp").exists()


@pytest.mark.parametrize("mode", ["read", "write"])
def test_an_lmdb_file_of_another_program_is_no_store(tmp_path: Path, mode: str) -> None:
    foreign = tmp_path / "foreign"
    with lmdb.open(str(foreign), max_dbs=8, lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"x")
    foreign.chmod(0o700)
    (foreign / "data.mdb").chmod(0o600)
    before = (foreign / "data.mdb").read_bytes()
    with pytest.raises(StoreFormat):
        ChunkStore.open(foreign, mode=mode)  # type: ignore[arg-type]
    assert (foreign / "data.mdb").read_bytes() == before
    with lmdb.open(str(foreign), max_dbs=8, lib_version=0) as env:  # not even with databases of our names
        with env.begin(write=True) as txn:
            txn.delete(b"theirs")
        for name in DATABASES:
            env.open_db(name.encode())
    with pytest.raises(StoreFormat, match="identity"):
        ChunkStore.open(foreign, mode=mode)  # type: ignore[arg-type]


def test_a_file_of_another_store_is_refused_also_while_the_store_is_open(path: Path, tmp_path: Path) -> None:
    """Before LMDB opens it, so nothing is written. What replaces the file itself keeps the identity."""
    with ChunkStore.open(tmp_path / "other", mode="write") as other:
        other.put_chunk(*make_chunk(2))

    def accept(found: str) -> None:
        if found != identity:
            raise StoreFormat("another store")

    with ChunkStore.open(path, mode="write") as store:
        identity = store.identity
        compact(store)
    salvage(path)
    with ChunkStore.open(path, mode="write", accept=accept) as store:
        assert store.identity == identity
        shutil.copy(path / "data.mdb", tmp_path / "backup")
        (tmp_path / "other/data.mdb").replace(path / "data.mdb")
        before = (path / "data.mdb").read_bytes()
        for work in (lambda: list(store.chunks()), lambda: store.put_chunk(*make_chunk(3)), store.check_file):
            with pytest.raises(StoreFormat, match="another store"):
                work()
        for mode in ("read", "write"):
            with pytest.raises(StoreFormat, match="another store"):
                ChunkStore.open(path, mode=mode, accept=accept)
        assert (path / "data.mdb").read_bytes() == before
        (tmp_path / "backup").replace(path / "data.mdb")
        assert store.identity == identity
        store.put_chunk(*make_chunk(3))


def test_a_damaged_identity_is_damage(path: Path) -> None:
    with ChunkStore.open(path, mode="write") as store, bare_writing(store) as (txn, dbs):
        value = bytearray(txn.get(b"identity", db=dbs["meta"]))
        value[-1] ^= 1
        txn.put(b"identity", bytes(value), db=dbs["meta"])
    with pytest.raises(StoreCorrupt, match="identity"):
        ChunkStore.open(path)


KIND = ("int8", 5, 2, 8)
SPEC = blob_spec(*KIND)
HEADER = blob_prefix(SPEC)[8:]
PAYLOAD = b"".join(b"\1" * tensor.num_bytes for tensor in SPEC.values())


def container(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + PAYLOAD


def _changed(change: Callable[[dict], object]) -> bytes:
    header = json.loads(HEADER)
    change(header)
    return json.dumps(header).encode()


@pytest.mark.parametrize(
    "header",
    [
        _changed(lambda h: h.update(extra=h["k"])),
        _changed(lambda h: h.update({f"t{i}": h["k"] for i in range(500)})),
        _changed(lambda h: h.pop("v_scale")),
        _changed(lambda h: h["k"].update(dtype="F64")),
        _changed(lambda h: h["k"].update(dtype="I8")),
        _changed(lambda h: h["k"].update(shape=[5, 16])),
        _changed(lambda h: h["k"].update(data_offsets=[0, 1 << 62])),
        _changed(lambda h: h["v"].update(data_offsets=h["k"]["data_offsets"])),
        _changed(lambda h: h["v"].update(data_offsets=[-80, 0])),
        _changed(lambda h: h.update(__metadata__={"format": "pt"})),
        HEADER + b" ",
        b"[" * 60_000,
        b"",
    ],
    ids=range(13),
)
def test_a_header_that_is_not_what_the_manifest_implies_is_refused(header: bytes) -> None:
    with pytest.raises(BadBlob):
        read_blob(container(header), *KIND)
    for claim in (1 << 63, (1 << 64) - 1, len(PAYLOAD) + 9):
        with pytest.raises(BadBlob):
            read_blob(struct.pack("<Q", claim) + HEADER + PAYLOAD, *KIND)
    assert read_blob(encode_blob(SPEC, {n: b"\1" * t.num_bytes for n, t in SPEC.items()}), *KIND)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("/proc/x", "cannot create the store at /proc/x: No such file or directory"),
        ("{folder}/file/x", "cannot create the store at {folder}/file/x: {folder}/file is not a directory"),
        ("{folder}/" + "x" * 300, "File name too long"),
    ],
)
def test_a_store_at_an_impossible_path(where: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        ChunkStore.open(Path(where.format(folder=tmp_path)), mode="write")
    assert message.format(folder=tmp_path) in caught.value.message
    assert "name another --store" in caught.value.hint
