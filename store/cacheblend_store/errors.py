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
    """The path does not contain a store."""

    exit_code = 3


class StoreFormat(StoreError):
    """The directory is not a cacheblend store, or has a different format version."""


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
    """The user has no permission to read or write the store, or the store is not private."""


class BadBlob(StoreError):
    """A blob or record does not match its digest or shape. A chunk then counts as a cache miss. layer: of the blob,
    None for a record."""

    def __init__(self, message: str, hint: str | None = None, *, layer: int | None = None) -> None:
        super().__init__(message, hint)
        self.layer = layer


class CodecError(StoreError):
    """The codec cannot represent some values of the KV. Nothing is stored."""


class TierError(StoreError):
    """A shared tier cannot be reached, refuses the request, or has a different format."""


class TierUsage(TierError):
    """The URL or the key file of a tier is wrong, or its extra is not installed."""

    exit_code = 2


class TierNotFound(TierError):
    """The bucket, folder or object at the URL of a tier does not exist."""

    exit_code = 3


class ChunkNotFound(StoreError):
    """No chunk has that id."""

    exit_code = 3


class AmbiguousId(StoreError):
    """Several chunk ids begin with the prefix."""

    exit_code = 3
