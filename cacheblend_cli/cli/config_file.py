"""Read and write cacheblend.toml and the user's config.toml; comments are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import FILE, config_files
from cacheblend_cli.text_files import read_text

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


def settings_file(*, user: bool = False, new: bool = False) -> Path:
    """Return the path of the user's file or the project's; with `new`, or without a project file, one in the working
    directory."""
    files = config_files()
    if user:
        return files[0]
    return Path.cwd() / FILE if new or len(files) < 2 else files[-1]


def remove_setting(document: TOMLDocument, name: str) -> bool:
    """Remove a setting, whether written with - or _. Returns whether it was there."""
    found = [known for known in document if known.replace("-", "_") == name]
    for known in found:
        del document[known]
    return bool(found)


def read_document(file: Path) -> TOMLDocument:
    """Parse the file; an empty document if there is none. Raises UsageError if it is not TOML or unreadable."""
    from tomlkit import document, parse
    from tomlkit.exceptions import TOMLKitError

    if not file.exists():
        return document()
    try:
        return parse(read_text(file))
    except TOMLKitError as error:
        raise UsageError(f"{file} is not valid TOML: {error}", "fix or remove it") from error


def write_text(file: Path, text: str) -> None:
    """Replace the file atomically. Raises UsageError if it cannot be written."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{file} cannot be written: {error.strerror}", "check its permissions") from error
