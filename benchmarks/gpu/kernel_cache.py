"""A Triton cache that moves: files that belong together name their folder, which becomes that of the target."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

FOLDER = b"@cache@"
GROUP = "__grp__"  # prefix of files with paths in them


def write_archive(target: Path, cache: Path, names: Iterable[str]) -> None:
    """Pack these folders of a cache."""
    with tarfile.open(target, "w:xz") as archive:
        for path in sorted(path for name in names for path in (cache / name).iterdir() if path.is_file()):
            data = path.read_bytes()
            if path.name.startswith(GROUP):
                data = data.replace(str(cache).encode(), FOLDER)
            info = tarfile.TarInfo(str(path.relative_to(cache)))
            info.size = len(data)
            archive.addfile(info, BytesIO(data))


def read_archive(source: Path, cache: Path) -> None:
    """Unpack into a cache."""
    with tarfile.open(source) as archive:
        archive.extractall(cache, filter="data")
    for path in cache.glob(f"*/{GROUP}*"):
        path.write_bytes(path.read_bytes().replace(FOLDER, str(cache).encode()))
