"""Read and write UTF-8 text for users, with errors that name the file and position."""

from __future__ import annotations

from pathlib import Path

from cacheblend_cli.errors import NotFoundError, UsageError


def read_text(path: Path) -> str:
    """Return the text of a file without byte order mark. Line ends are not converted.

    Raises NotFoundError if it does not exist, UsageError if it cannot be read or is not UTF-8.
    """
    try:
        return decode_text(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", "check the path") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error


def decode_text(data: bytes, name: str) -> str:
    """Decode bytes like `read_text`. name: used in the error."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} has invalid UTF-8 at byte {error.start}", "convert it to UTF-8") from error


def write_text(path: Path, text: str, hint: str, *, new: bool = False) -> None:
    """Write a file. new: fail if it exists. Raises UsageError with the hint if it cannot be written."""
    try:
        with path.open("x" if new else "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint) from error


def check_text(text: str, name: str) -> None:
    """Raise UsageError for text that tokenizers reject: lone surrogates, from arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not UTF-8 at character {error.start + 1}", "convert it: iconv -t utf-8") from None
