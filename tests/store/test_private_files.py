"""Files are opened in this user's own directories, and lead nowhere else."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from cacheblend_store import private_files
from cacheblend_store.private_files import (
    InsecurePath,
    check_files,
    exposed,
    make_folder,
    open_file,
    open_folder,
    read_bytes,
    read_regular,
    replace,
    temporary_of,
)

OTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC])
@pytest.mark.parametrize("target", ["there", "missing"])
def test_a_link_is_not_followed(folder: Path, tmp_path: Path, flags: int, target: str) -> None:
    (tmp_path / "there").write_text("mine")
    (folder / "file").symlink_to(tmp_path / target)
    for anywhere in (False, True):
        with pytest.raises(InsecurePath, match="is a symbolic link"):
            open_file(folder / "file", flags, anywhere=anywhere)
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY])
@pytest.mark.parametrize("kind", ["FIFO", "directory"])
def test_a_special_file_is_refused_at_once(folder: Path, flags: int, kind: str) -> None:
    (os.mkfifo if kind == "FIFO" else os.mkdir)(folder / "file")
    with pytest.raises(OSError, match=r"not a regular file|directory"):
        open_file(folder / "file", flags)


@as_root
def test_files_of_other_users_are_refused(folder: Path) -> None:
    (folder / "file").write_text("theirs")
    os.chown(folder / "file", OTHER, OTHER)
    for anywhere in (False, True):
        with pytest.raises(InsecurePath, match="belongs to another user"):
            open_file(folder / "file", anywhere=anywhere)
    os.chown(folder, OTHER, OTHER)  # in their own directory it is their file
    os.close(open_file(folder / "file", anywhere=True))
    with pytest.raises(InsecurePath, match="belongs to another user"):
        open_file(folder / "file")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write_is_refused_and_mended_where_it_is_made(folder: Path, mode: int) -> None:
    (folder / "file").write_text("x")
    folder.chmod(mode)
    with pytest.raises(InsecurePath, match="writable by other users"):
        open_file(folder / "file")
    os.close(open_file(folder / "file", anywhere=True))
    make_folder(folder)
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o022
    os.close(open_file(folder / "file"))


def test_made_directories_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        replace(tmp_path / "a" / "b" / "file", b"x")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("a", "a/b", "a/b/file")] == [0o700, 0o700, 0o600]


def test_a_directory_behind_a_link_is_checked_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    replace(tmp_path / "link" / "file", b"x")
    assert (folder / "file").read_bytes() == b"x"
    folder.chmod(0o777)
    with pytest.raises(InsecurePath):
        open_folder(tmp_path / "link")


@pytest.mark.parametrize("above", ["of the directory", "of a link to it"])
def test_directories_above_are_part_of_it(tmp_path: Path, above: str) -> None:
    (tmp_path / "open").mkdir()
    if above == "of the directory":
        folder = tmp_path / "open" / "own"
        make_folder(folder)
    else:
        make_folder(tmp_path / "own")
        folder = tmp_path / "open" / "link"
        folder.symlink_to(tmp_path / "own")
    assert exposed(folder) is None
    (tmp_path / "open").chmod(0o777)
    error = exposed(folder)
    assert error is not None
    assert error.filename == str(tmp_path / "open")
    (tmp_path / "open").chmod(0o1777)  # as /tmp
    assert exposed(folder) is None


def test_files_that_a_library_opens_are_checked_before(folder: Path, tmp_path: Path) -> None:
    check_files(folder / "missing")
    (folder / "good").touch()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    check_files(folder / "good", folder / "missing")
    with pytest.raises(InsecurePath):
        check_files(folder / "good", folder / "link")


def test_an_emptied_file_is_checked_first(folder: Path) -> None:
    (folder / "file").write_text("old and long")
    with os.fdopen(open_file(folder / "file", os.O_WRONLY | os.O_TRUNC), "w") as stream:
        stream.write("new")
    assert read_bytes(folder / "file", 10) == b"new"


@pytest.mark.parametrize("read", [read_bytes, read_regular])
def test_large_and_special_files_are_not_read(folder: Path, read: object) -> None:
    (folder / "file").write_bytes(b"12345")
    assert read(folder / "file", 5) == b"12345"  # type: ignore[operator]
    with pytest.raises(OSError, match="larger than 4 bytes") as caught:
        read(folder / "file", 4)  # type: ignore[operator]
    assert caught.value.errno == errno.EFBIG
    os.mkfifo(folder / "fifo")
    with pytest.raises(InsecurePath, match="not a regular file"):
        read(folder / "fifo", 4)  # type: ignore[operator]


def test_a_named_file_may_be_a_link_to_a_regular_one(folder: Path) -> None:
    (folder / "file").write_bytes(b"x")
    (folder / "link").symlink_to("file")
    (folder / "device").symlink_to("/dev/zero")
    assert read_regular(folder / "link", 1) == b"x"
    with pytest.raises(InsecurePath):
        read_regular(folder / "device", 1)


def test_a_failed_write_leaves_the_old_file_and_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(folder / "file", b"old")

    def full(handle: int, mode: str) -> None:
        os.close(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private_files.os, "fdopen", full)
    for write in (lambda: replace(folder / "file", b"new"), lambda: temporary_of(folder / "file", b"new")):
        with pytest.raises(OSError, match="No space left"):
            write()
    assert [p.name for p in folder.iterdir()] == ["file"]
    assert (folder / "file").read_bytes() == b"old"
