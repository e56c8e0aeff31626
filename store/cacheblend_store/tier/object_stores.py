"""Object stores that a tier is built on: S3, Google Cloud Storage, Azure, a folder or memory, through obstore."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from cacheblend_store.errors import StoreError, StoreNoSpace, StorePermission, TierError, TierNotFound, TierUsage

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "file", "memory")
_CONNECT_S, _REQUEST_S = 2, 30
_DENIED = re.compile(r"40[13] (Forbidden|Unauthorized)|[Pp]ermission denied")


class TierObject(NamedTuple):
    name: str
    size: int  # bytes
    modified: float  # seconds since the epoch


class ObjectStore(Protocol):
    """Objects of bytes by name, such as "v3/2f/9c". Several threads call it at once. A put replaces the whole object or
    fails; a reader never sees part of it. Raises FileNotFoundError for an object that does not exist."""

    def size(self, name: str, /) -> int: ...

    def get(self, name: str, start: int = 0, end: int | None = None, /) -> bytes | memoryview:
        """Return bytes start..end - 1, fewer if the object ends before."""
        ...

    def put(self, name: str, data: bytes, /) -> None: ...

    def delete(self, names: Sequence[str], /) -> None:
        """Delete up to 1,000 objects. It is no error if one does not exist."""
        ...

    def list(self, prefix: str, at_a_time: int, /) -> Iterator[TierObject]:
        """Yield the objects whose names begin with the prefix and "/", in any order. at_a_time: objects per request."""
        ...


class _Obstore:
    def __init__(self, store: Any) -> None:
        self._store = store

    def size(self, name: str) -> int:
        return int(self._store.head(name)["size"])

    def get(self, name: str, start: int = 0, end: int | None = None) -> memoryview:
        if end is None:
            return memoryview(self._store.get(name).bytes())
        return memoryview(self._store.get_range(name, start=start, end=end))

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data)

    def delete(self, names: Sequence[str]) -> None:
        self._store.delete(names)

    def list(self, prefix: str, at_a_time: int) -> Iterator[TierObject]:
        for page in self._store.list(prefix=prefix, chunk_size=at_a_time):
            for meta in page:
                yield TierObject(meta["path"], int(meta["size"]), meta["last_modified"].timestamp())


_memory: dict[str, ObjectStore] = {}  # this process's object stores, by URL


def check_url(url: str, *, any_scheme: bool = False) -> None:
    """Raise TierUsage for an unknown scheme, or a URL with credentials, which it omits."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise TierUsage(
            "the URL of a tier may have only a bucket and a prefix",
            "credentials come from the environment: docs/scale.md",
        )
    if parts.scheme not in SCHEMES and not any_scheme:
        known = "s3://BUCKET/PREFIX, gs://, az://, file:///FOLDER, memory:///"
        raise TierUsage(f"unknown tier {url!r}", f"known: {known}")
    if parts.scheme == "file" and parts.netloc:
        raise TierUsage(f"{url!r} contains a host name", "write three slashes: file:///FOLDER")


def open_objects(url: str, *, create: bool = True) -> tuple[ObjectStore, Path | None]:
    """Return the object store at a URL of SCHEMES, and its folder if it is one. Raises TierUsage, TierNotFound.

    Credentials and endpoint come from the environment variables that obstore reads (AWS_ACCESS_KEY_ID,
    AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...). create: create a missing folder
    if its parent exists.
    """
    try:
        from obstore.store import LocalStore, MemoryStore, from_url
    except ImportError as error:
        raise TierUsage("a tier needs obstore, which is not installed", "install the extra: tier") from error
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return _memory.setdefault(url, _Obstore(MemoryStore())), None
    with errors_of(url):
        if scheme == "file":
            folder = Path(unquote(urlsplit(url).path))
            if not folder.is_dir() and not (create and folder.parent.is_dir()):
                raise TierNotFound(f"the folder {folder} does not exist", "create it, or mount its filesystem")
            return _Obstore(LocalStore(folder, mkdir=True)), folder
        client: Any = {"timeout": f"{_REQUEST_S}s", "connect_timeout": f"{_CONNECT_S}s", "allow_http": True}
        return _Obstore(from_url(url, client_options=client, retry_config={"max_retries": 2})), None


@contextmanager
def errors_of(url: str) -> Iterator[None]:
    """Convert errors of the library and the system to StoreErrors, in one line and without URL queries."""
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise TierNotFound(f"{url}: {_line(error)}", "check bucket and prefix") from error
    except Exception as error:
        kind, text = type(error).__name__, str(error)
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "StorageFull" in text:
            raise StoreNoSpace(f"no space is left at {url}", "free some space, or use another tier") from error
        if kind in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError") or _DENIED.search(text):
            raise StorePermission(
                f"{url} may not be used: {_line(error)}", "check the credentials in the environment, and their rights"
            ) from error
        if "NoSuchBucket" in text:
            raise TierNotFound(f"the bucket at {url} does not exist", "create it, or check the URL") from error
        if "MissingAccount" in text or isinstance(error, ValueError):
            raise TierUsage(f"{url} cannot be used: {_line(error)}", "see docs/scale.md") from error
        raise TierError(f"{url} failed: {_line(error)}", "check the network and the endpoint") from error


def _line(error: Exception) -> str:
    """Return the first line of an error without URL queries, or the error code of an XML body."""
    text, xml, body = str(error).partition("<?xml")
    if xml:
        code = re.search(r"<Code>(\w+)</Code>", body)
        text += code[1] if code else xml + body
    line = (text.strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"://\S+", lambda rest: rest[0].partition("?")[0], line)[:300]
