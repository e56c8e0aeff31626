"""A GGUF file as a model directory: converted once per file, and kept in the user's cache."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cacheblend_store.private_files import make_folder, open_folder

from cacheblend_cli import user_cache
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_names import is_model
from cacheblend_cli.model.model_files import GGUF_INDEX

FORMAT = 4  # version of a conversion's output: increase it when the output changes


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a directory. Raises UsageError if there are several."""
    found = sorted(p for p in folder.glob("*.gguf") if is_model(p.name))
    if len(found) > 1:
        raise UsageError(
            f"{folder} holds {len(found)} GGUF files",
            f"name one, such as --model {found[0]}; there is also {found[1].name}",
        )
    return found[0] if found else None


def model_dir_of(file: Path, say: Callable[[str], None] | None = None) -> Path:
    """Return the directory that stands for a GGUF file. say: called when the file is read for the first time. Raises
    UsageError, naming what cannot be read."""
    try:
        at = file.resolve(strict=True)
        stat = at.stat()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "check the path") from error
    kept = user_cache.place("gguf", FORMAT, str(at), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if _is_kept(kept):
        return kept
    if say:
        say(f"reading {file.name} for the first time: its tokenizer and tensor index are cached")
    try:
        make_folder(kept.parent)
        folder = Path(tempfile.mkdtemp(dir=kept.parent, prefix="new-"))
    except OSError:  # nothing can be kept: convert for this process only
        folder = kept = Path(tempfile.mkdtemp(prefix="cacheblend-gguf-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
    try:
        from cacheblend_cli.model.gguf_files.conversion import convert  # imports torch

        convert(at, stat, folder)
        if folder != kept:
            _put_in_place(folder, kept)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return kept


def _is_kept(folder: Path) -> bool:
    """Return whether the folder is a conversion of this user."""
    try:
        os.close(open_folder(folder))
    except OSError:
        return False
    return (folder / GGUF_INDEX).is_file()


def _put_in_place(folder: Path, kept: Path) -> None:
    """Move the folder into place atomically, unless another process did it first."""
    try:
        os.replace(folder, kept)
    except OSError:
        if not _is_kept(kept):
            raise
        shutil.rmtree(folder, ignore_errors=True)
