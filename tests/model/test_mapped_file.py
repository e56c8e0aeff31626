"""A mapped file: addresses inside it, and a message in place of SIGBUS when it shrinks."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cacheblend_kernels import compiled

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.mapped_file import MappedFile, overlap

needs_compiled = pytest.mark.skipif(compiled.library() is None, reason="needs the compiled code")

CHILD = """
import ctypes, faulthandler, mmap, os, pathlib, sys
import numpy as np
from cacheblend_cli.model.mapped_file import MappedFile

case, path, other = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
if "faulthandler" in case:
    faulthandler.enable()
before = [MappedFile(path) for _ in range(3)]
mapped = MappedFile(path)
address = mapped.address(40_000, 1)
with open(other, "r+b") as stream:
    plain = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
elsewhere = np.frombuffer(plain, np.uint8).ctypes.data + 40_000
if "removed" in case:  # its guard goes, and another file's mapping may take its place
    del mapped, before
    elsewhere = np.frombuffer(plain, np.uint8).ctypes.data + 40_000
os.truncate(path, 100)
os.truncate(other, 100)
if "raised" in case:
    os.kill(os.getpid(), 7)
print(ctypes.string_at(elsewhere if "elsewhere" in case else address, 1))
"""


def run(case: str, folder: Path) -> tuple[int, str, str]:
    for name in ("model.gguf", "other"):
        (folder / name).write_bytes(bytes(100_000))
    found = subprocess.run(
        [sys.executable, "-c", CHILD, case, folder / "model.gguf", folder / "other"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return found.returncode, found.stdout, found.stderr


@needs_compiled
@pytest.mark.parametrize("case", ["", "faulthandler"])
def test_a_file_that_shrinks_ends_in_a_message(tmp_path: Path, case: str) -> None:
    told = f"error: {tmp_path}/model.gguf became shorter or unreadable while it was mapped; fetch it again\n"
    assert run(case, tmp_path) == (2, "", told)


@needs_compiled
@pytest.mark.parametrize("case", ["elsewhere", "elsewhere, removed", "raised"])
def test_another_bus_error_still_kills(tmp_path: Path, case: str) -> None:
    assert run(case, tmp_path) == (-signal.SIGBUS, "", "")


@needs_compiled
def test_the_handler_before_is_still_called(tmp_path: Path) -> None:
    code, out, err = run("elsewhere, faulthandler", tmp_path)
    assert (code, out) == (-signal.SIGBUS, "")
    assert "Fatal Python error: Bus error" in err


@needs_compiled
def test_guards_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"x")
    numbers = list[int]()
    for _ in range(3):
        held = [MappedFile(tmp_path / "m") for _ in range(70)]  # more than there are guards: they work without
        assert all(ctypes.string_at(mapped.address(0, 1), 1) == b"x" for mapped in held)
        del held
        gc.collect()
        number = compiled.guard_mapping(0, 0, b"", 2)
        assert number is not None
        compiled.unguard_mapping(number)
        numbers.append(number)
    assert len(set(numbers)) == 1


def test_addresses_are_inside_the_file(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(bytes(range(200)))
    mapped = MappedFile(tmp_path / "m")
    assert mapped.size == 200
    assert ctypes.string_at(mapped.address(198, 2), 2) == bytes([198, 199])
    assert mapped.address(200, 0) == mapped.address(0, 200) + 200
    for offset, num_bytes in ((-1, 1), (0, 201), (199, 2), (201, 0), (5, -1), (2**63, 1), (0, 2**64)):
        with pytest.raises(UsageError, match=r"are not inside .*/m, which has 200"):
            mapped.address(offset, num_bytes)


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    for path, told in (
        (tmp_path / "fifo", "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / "empty", "is empty"),
        (tmp_path / "none", "cannot be read: No such file"),
    ):
        with pytest.raises(UsageError, match=told) as refused:
            MappedFile(path)
        assert str(path) in refused.value.message


def test_without_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    (tmp_path / "m").write_bytes(b"x")
    assert ctypes.string_at(MappedFile(tmp_path / "m").address(0, 1), 1) == b"x"


@pytest.mark.parametrize(
    ("ranges", "shared"),
    [
        ([(0, 4, "a"), (4, 8, "b"), (4, 4, "empty")], None),
        ([(4, 8, "b"), (0, 5, "a")], ("a", "b")),
        ([(0, 100, "a"), (1, 2, "b"), (50, 60, "c")], ("a", "b")),
        ([(3, 8, "a"), (3, 8, "b")], ("a", "b")),
    ],
)
def test_overlaps(ranges: list[tuple[int, int, str]], shared: tuple[str, str] | None) -> None:
    assert overlap(ranges) == shared
