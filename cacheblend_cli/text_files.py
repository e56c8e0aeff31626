"""Text that a user hands in, as a file or as bytes, or gets as a file: UTF-8, and errors that name where."""

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
    """Decode bytes as read_text does. name: used in the error."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} has invalid UTF-8 at byte {error.start}", "convert it to UTF-8") from error


def write_text(path: Path, text: str, hint: str, *, new: bool = False) -> None:
    """new: not over a file that is there. Raises UsageError with the hint where it cannot be written."""
    try:
        with path.open("x" if new else "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint) from error


def check_text(text: str, name: str) -> None:
    """Raises UsageError for what a tokenizer does not take: bytes of an argument that are no UTF-8, half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is no UTF-8 at character {error.start + 1}", "convert it: iconv -t utf-8") from None
