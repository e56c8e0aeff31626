"""Facts measured once on a machine: small files in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

PACKED_WEIGHTS = "packed"
"""Kind of the files that model/packed_cache.py keeps: the only large ones."""


def folder(kind: str) -> Path:
    """Directory of one kind of files. It need not exist."""
    return user_cache_path("cacheblend") / kind


def place(kind: str, *identity: object) -> Path:
    """Return the path of the file for these facts, which may not exist."""
    return folder(kind) / hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def recall(path: Path) -> str:
    """Return the kept text; "" if there is none or it is not UTF-8."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def keep(path: Path, text: str) -> None:
    """Write the file, unless that is impossible, as in a read-only home."""
    with suppress(OSError):
        replace(path, text)


def replace(path: Path, text: str) -> None:
    """Write the file as a whole: processes side by side never see half of it. Raises OSError."""
    temporary = temporary_of(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def settle(path: Path, text: str) -> str:
    """Write the file unless another process did meanwhile. Returns what is in it: every process goes on with the same."""
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
    """Create an empty file beside `path`, with a name of its own and for its owner alone, and the folder. Raises OSError."""
    from tempfile import mkstemp

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(descriptor)
    return Path(name)
