"""Projects that this user trusts. A checkout can bring its own cacheblend.toml and .cacheblend: until they are trusted,
they may not choose a model, a store or where data is sent.

The record is in the user's data directory, where no checkout can write: a digest of each trusted cacheblend.toml, and
a secret. A `.cacheblend` that was made on this machine by this user holds a stamp: the identity of its store, with a
digest of that and of the directory that is keyed by the secret. The owner of a file proves nothing, because `git clone`
makes the victim the owner; nor does the directory alone, because `git pull` replaces ignored files in it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec
from cacheblend_store import private_files
from platformdirs import user_data_path

from cacheblend_cli import user_cache

PROJECT_FOLDER = ".cacheblend"
STORE = "store"
_STAMP = "stamp"
_MOST_BYTES = 1 << 20


def is_trusted(file: Path, content: bytes) -> bool:
    """Return whether this user trusts a settings file with exactly this content."""
    return _record().get(_path(file)) == _digest(content)


def trust(file: Path, content: bytes) -> None:
    """Trust a settings file as long as it has this content. Raises OSError if that cannot be recorded."""
    _keep(_record() | {_path(file): _digest(content)})


def distrust(file: Path) -> None:
    """Stop trusting a settings file. Raises OSError."""
    record = _record()
    if record.pop(_path(file), None) is not None:
        _keep(record)


def _path(file: Path) -> str:
    """Return a file's real path, except that a link itself is not followed: its own folder is what relative paths in it
    refer to."""
    return os.path.join(os.path.realpath(file.parent), file.name)


def project_folder() -> Path | None:
    """Return `.cacheblend` of the working directory if the store in it may be used: this user made it, or it has no
    store yet."""
    folder = Path(PROJECT_FOLDER)
    if not _is_folder(folder) or has_link(folder):
        return None
    return folder if not has_store(folder) or stamped(folder) is not None else None


def has_store(folder: Path) -> bool:
    """Return whether a `.cacheblend` has a store; a directory with only a server's socket is not one."""
    return os.path.lexists(folder / STORE / "data.mdb") or has_link(folder)


def has_link(folder: Path) -> bool:
    """Return whether the store of a `.cacheblend` is a symbolic link, which could lead to any store of this user."""
    return (folder / STORE).is_symlink()


def stamped(folder: Path) -> str | None:
    """Return the identity of the store that this user's stamp allows in a `.cacheblend`; None without such a stamp.
    Stamps of version 0.2.13 and earlier allow any store: ""."""
    with suppress(OSError, ValueError):
        identity, _, digest = _read(folder / _STAMP).decode("ascii").strip().rpartition(":")
        if _is_folder(folder) and digest == _stamp(folder, identity, _secret()):
            return identity
    return None


def stamp(folder: Path, identity: str) -> None:
    """Allow the store with this identity in a `.cacheblend`. Raises OSError.

    A .gitignore keeps it out of repositories: who knows the identity can replace the store.
    """
    if not _is_folder(folder):
        raise private_files.InsecurePath("is not a directory of this user", folder)
    if has_link(folder):
        raise private_files.InsecurePath("is a symbolic link", folder / STORE)
    _write(folder / _STAMP, f"{identity}:{_stamp(folder, identity, _secret(create=True))}\n".encode())
    if not os.path.lexists(folder / ".gitignore"):
        _write(folder / ".gitignore", b"*\n")


def unstamp(folder: Path) -> None:
    """Undo `stamp`. Raises OSError."""
    (folder / _STAMP).unlink(missing_ok=True)


def _is_folder(folder: Path) -> bool:
    """Return whether the path is a directory of this user, not a link to one."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _stamp(folder: Path, identity: str, secret: bytes) -> str:
    """Return the digest of a stamp. It stays valid when the directory is renamed, and not in a copy."""
    data = f"{folder.stat().st_ino}:{identity}".removesuffix(":")
    return hashlib.blake2b(data.encode(), key=secret, digest_size=16).hexdigest()


def _secret(*, create: bool = False) -> bytes:
    """Return the secret of stamps. Raises OSError if there is none or it cannot be kept."""
    file = user_data_path("cacheblend") / "stamp-secret"
    if create and not user_cache.recall(file):
        user_cache.settle(file, os.urandom(32).hex())
    secret = user_cache.recall(file)
    if len(secret) != 64:
        raise OSError(errno.ENOENT, "no secret is kept", os.fspath(file))
    return secret.encode()


def _record() -> dict[str, str]:
    """Return path -> digest of the trusted files."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(private_files.read_bytes(_record_file(), _MOST_BYTES), type=dict[str, str])
    return {}


def _keep(record: dict[str, str]) -> None:
    private_files.replace(_record_file(), msgspec.json.encode(record))


def _record_file() -> Path:
    return user_data_path("cacheblend") / "trusted.json"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _read(file: Path) -> bytes:
    """Read a small file of this user in a project, which its group may be allowed to write."""
    with os.fdopen(private_files.open_file(file, anywhere=True), "rb") as stream:
        return stream.read(_MOST_BYTES)


def _write(file: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(private_files.open_file(file, flags, anywhere=True), "wb") as stream:
        stream.write(data)
