"""Path of a running engine's socket. Imports neither torch nor numpy, to keep warm answers fast."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from cacheblend_store import private_files
from cacheblend_store.private_files import InsecurePath, exposed, read_regular

from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Settings
from cacheblend_cli.settings.identity import IDENTITY
from cacheblend_cli.version import __version__

PROTOCOL = 11
_MOST_BYTES = 16 << 20  # of a prompt file
_LONGEST = 100  # maximum bytes of a socket path; the system allows 107
_NAME = "engine-"
_ELSEWHERE = "set XDG_RUNTIME_DIR to a directory of your own"


def socket_of(settings: Settings) -> Path:
    """Return the socket of the engine of this version for these settings (store and IDENTITY)."""
    identity = {name: getattr(settings, name) for name in IDENTITY}
    lora = os.path.realpath(Path(settings.lora).expanduser()) if settings.lora else ""
    identity |= {
        "model": _model(settings.model),
        "lora": lora,
        "prompt": _content(settings.prompt),
        "version": [__version__, PROTOCOL],
    }
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=6).hexdigest()
    return folder_of(settings) / f"{_NAME}{digest}.sock"


def sockets_of(settings: Settings) -> list[Path]:
    """Return the sockets of all engines over the store, including engines that have ended."""
    return sorted(folder_of(settings).glob(f"{_NAME}*.sock"))


def folder_of(settings: Settings) -> Path:
    """Return the directory for sockets: the store, or a private directory if the path of the store is too long or the
    store is not this user's alone."""
    store = Path(os.path.realpath(settings.store_path))
    is_own = not store.exists() or (os.access(store, os.W_OK) and exposed(store) is None)
    if is_own and len(os.fsencode(store)) + len(_NAME) + 18 <= _LONGEST:
        return store
    name = f"cacheblend-{hashlib.blake2b(os.fsencode(store), digest_size=8).hexdigest()}"
    own = own_folder()
    fits = len(os.fsencode(own / name)) + len(_NAME) + 18 <= _LONGEST
    return (own if fits else Path("/tmp") / own.name) / name


def own_folder() -> Path:
    """Return this user's directory for run-time files. It need not exist, see `make_folder`."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / _own_name()


class SocketFile:
    """The file of a bound socket, and whether it is still in its place."""

    def __init__(self, path: Path, *folders: Path) -> None:
        """Call it when the socket was bound. folders: directories without which the socket means nothing."""
        self.path, self._folders = path, folders
        self._bound = self._found()

    @property
    def is_in_place(self) -> bool:
        """Return whether socket and directories are those of before: not moved, removed or replaced. Inodes cannot be
        reused as long as the socket and a file of each directory are open."""
        return bool(self._bound) and self._found() == self._bound

    def remove(self) -> None:
        """Remove the socket, but not one that a later server put there."""
        if self._bound[:1] == self._found()[:1]:
            self.path.unlink(missing_ok=True)

    def _found(self) -> list[tuple[int, int]]:
        found = []
        with suppress(OSError):
            for path in (self.path, *self._folders):
                info = os.stat(path)
                found.append((info.st_dev, info.st_ino))
        return found


def make_folder(folder: Path) -> None:
    """Create the socket's directory.

    Raises UsageError if the directory, or the parent of the fallback directory, belongs to another user or is a link:
    others could replace the socket by their own.
    """
    is_fallback = folder.parent.name == _own_name()
    for part in (folder.parent, folder) if is_fallback else (folder,):
        try:
            if is_fallback and part.is_symlink():
                raise InsecurePath("is a symbolic link", part)
            private_files.make_folder(part)
        except InsecurePath as error:
            raise UsageError(f"{part} {error.strerror}", _ELSEWHERE) from error


def _own_name() -> str:
    """Return the name of this user's directory below the directory for run-time files."""
    return f"cacheblend-{os.getuid()}"


def _model(name: str) -> str:
    """Return a model's identity: its name, or the real path of its directory or file."""
    if not name:
        from cacheblend_cli.model.named import default_model

        return default_model()
    path = Path(name).expanduser()
    return os.path.realpath(path) if path.exists() else name


def _content(path: str) -> str:
    """Return the content of the prompt file; "" without one, or if it cannot be read (which is reported elsewhere)."""
    try:
        return read_regular(Path(path).expanduser(), _MOST_BYTES).decode() if path else ""
    except (OSError, UnicodeDecodeError):
        return ""
