"""Text that a user hands in, as a file or as bytes: UTF-8, and errors that name where it is from."""

from __future__ import annotations

from pathlib import Path

from cacheblend_cli.errors import NotFoundError, UsageError


def read_text(path: Path) -> str:
    """The file as text, without a byte order mark; line ends are left as they are.

    Raises NotFoundError when it is not there, UsageError when it cannot be read or is no UTF-8.
    """
    try:
        return decode_text(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", "check the path") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error


def decode_text(data: bytes, name: str) -> str:
    """As read_text, from bytes. name: what the error calls them."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} has invalid UTF-8 at byte {error.start}", "convert it to UTF-8") from error
