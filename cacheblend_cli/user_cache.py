"""Small files in the user's cache directory with facts that are measured once per machine."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

PACKED_WEIGHTS = "packed"
"""Kind of the files of model/packed_cache.py, the only large ones."""


def folder(kind: str) -> Path:
    """Return the directory for one kind of files. It need not exist."""
    return user_cache_path("cacheblend") / kind


def place(kind: str, *identity: object) -> Path:
    """Return the path of the file for these facts. It need not exist."""
    return folder(kind) / hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def recall(path: Path) -> str:
    """Return the text of a file; "" if it is missing or not UTF-8."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def keep(path: Path, text: str) -> None:
    """Write the file. Failures are ignored, such as a read-only home."""
    with suppress(OSError):
        replace(path, text)


def replace(path: Path, text: str) -> None:
    """Write the file atomically: concurrent processes never see half of it. Raises OSError."""
    temporary = temporary_of(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def settle(path: Path, text: str) -> str:
    """Write the file unless another process did meanwhile. Return its content, which is the same for every process."""
    with suppress(OSError):
        temporary = temporary_of(path)
        try:
            temporary.write_text(text, encoding="utf-8")
            try:
                os.link(temporary, path)  # fails if the file exists
            except FileExistsError:
                pass
            except OSError:  # a filesystem without hard links
                if not path.exists():
                    temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return recall(path) or text


def temporary_of(path: Path) -> Path:
    """Create an empty private file with a unique name next to `path`, and the folder. Raises OSError."""
    from tempfile import mkstemp

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(descriptor)
    return Path(name)
