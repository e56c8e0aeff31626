"""Small files in the user's cache directory with facts that are measured once per machine."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from cacheblend_store import private_files
from platformdirs import user_cache_path

_MAX_BYTES = 16 << 20
PACKED_WEIGHTS = "packed"
"""Kind of the large files of earlier versions, which packed weights."""
QUANTISED = "quantised"
"""Kind of the folders of model/gguf_files/quantise.py, which are large."""


def folder(kind: str) -> Path:
    """Return the directory for one kind of files. It need not exist."""
    return user_cache_path("cacheblend") / kind


def place(kind: str, *identity: object) -> Path:
    """Return the path of the file for these facts. It need not exist."""
    return folder(kind) / hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def recall(path: Path) -> str:
    """Return the text of a file; "" if it is missing or not UTF-8."""
    with suppress(OSError, UnicodeDecodeError):
        return private_files.read_bytes(path, _MAX_BYTES).decode()
    return ""


def keep(path: Path, text: str) -> None:
    """Write the file. Failures are ignored, such as a read-only home."""
    with suppress(OSError):
        private_files.replace(path, text.encode())


def settle(path: Path, text: str) -> str:
    """Write the file unless another process did meanwhile. Return its content, which is the same for every process."""
    with suppress(OSError):
        temporary = private_files.temporary_of(path, text.encode())
        try:
            os.link(temporary, path)  # fails if the file exists
        except OSError:  # or on a filesystem without hard links
            if not os.path.lexists(path):
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return recall(path) or text
