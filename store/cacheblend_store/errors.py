"""What can go wrong with a store: what happened (`message`) and what to do (`hint`)."""

from __future__ import annotations


class StoreError(Exception):
    """exit_code: what a command that ends with it exits with."""

    exit_code = 4

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class StoreNotFound(StoreError):
    """There is no store at the path."""

    exit_code = 3


class StoreFormat(StoreError):
    """Not a store of ours, or one of another format version."""


class StoreCorrupt(StoreError):
    """The file is damaged: truncated, or a page or record does not read."""


class StoreLocked(StoreError):
    """Another process holds the writer lock."""


class StoreFull(StoreError):
    """The map or the quota is full."""


class StoreNoSpace(StoreError):
    """The disk is full."""


class StoreIOError(StoreError):
    """Reading or writing the file failed."""


class StorePermission(StoreError):
    """The store may not be read or written by this user, or is not private."""


class BadBlob(StoreError):
    """One blob or manifest does not match its digest or shape. The chunk is a miss.

    key and layer say which, where that is known (layer None: the manifest); reason says why, without naming it.
    """

    def __init__(
        self, message: str, hint: str | None = None, *, key: bytes = b"", layer: int | None = None, reason: str = ""
    ) -> None:
        super().__init__(message, hint)
        self.key, self.layer, self.reason = key, layer, reason or message


class CodecError(StoreError):
    """KV with values that its codec cannot hold. Nothing of it is stored."""


class ArchiveError(StoreError):
    """An export that is not taken in: damaged, hostile, unsigned where a signature is asked for, or too big."""


class ChunkNotFound(StoreError):
    """No chunk has that id."""

    exit_code = 3


class AmbiguousId(StoreError):
    """More than one chunk id begins with the prefix; candidates are some of them."""

    exit_code = 3

    def __init__(self, message: str, hint: str | None = None, *, candidates: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.candidates = candidates
