"""Sources of reference texts: installed programs, and zip packages of a bounded size."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECONDS = 60  # for one run of a reference program
MOST_BYTES = 32 << 20  # of an unpacked package, and of its text: files made to exhaust the memory have no reference


class NoReference(Exception):
    """Raised for a file without a reference: it is damaged, or the program is not installed."""


def output_of(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        raise NoReference(f"{program} is not installed")
    done = subprocess.run([program, *arguments], capture_output=True, timeout=_SECONDS)
    if done.returncode:
        raise NoReference(f"{program} exits {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


@contextmanager
def package_of(path: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(path) as package:
        if sum(member.file_size for member in package.infolist()) > MOST_BYTES:
            raise NoReference("is too large unpacked")
        yield package
