"""Errors of the store. Each says what happened (`message`) and what to do (`hint`)."""

from __future__ import annotations


class StoreError(Exception):
    """Base class. exit_code: exit status of a command that fails with it."""

    exit_code = 4

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class StoreNotFound(StoreError):
    """There is no store at the path."""

    exit_code = 3


class StoreFormat(StoreError):
    """The directory is not a cacheblend store, or has another format version."""


class StoreCorrupt(StoreError):
    """The file is damaged: truncated, or a page or record cannot be read."""


class StoreLocked(StoreError):
    """Another process holds the writer lock."""


class StoreFull(StoreError):
    """The map or the quota is full."""


class StoreNoSpace(StoreError):
    """The disk is full."""


class StoreIOError(StoreError):
    """Reading or writing the file failed."""


class StorePermission(StoreError):
    """This user may not read or write the store, or the store is not private."""


class BadBlob(StoreError):
    """A blob or manifest does not match its digest or shape. The chunk is a cache miss.

    key, layer: the record, if known (layer None = the manifest). reason: the cause, without the record's name.
    """

    def __init__(
        self, message: str, hint: str | None = None, *, key: bytes = b"", layer: int | None = None, reason: str = ""
    ) -> None:
        super().__init__(message, hint)
        self.key, self.layer, self.reason = key, layer, reason or message


class CodecError(StoreError):
    """KV has values that its codec cannot represent. Nothing of it is stored."""


class TierError(StoreError):
    """A shared tier cannot be reached, refuses, or has another format."""


class TierUsage(TierError):
    """The URL or the key file of a tier is wrong, or its extra is not installed."""

    exit_code = 2


class TierNotFound(TierError):
    """There is no bucket or folder at the URL of a tier, or not that object."""

    exit_code = 3


class ChunkNotFound(StoreError):
    """No chunk has that id."""

    exit_code = 3


class AmbiguousId(StoreError):
    """More than one chunk id begins with the prefix. candidates: some of these ids."""

    exit_code = 3

    def __init__(self, message: str, hint: str | None = None, *, candidates: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.candidates = candidates
