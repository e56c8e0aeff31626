"""Bind the sockets of a server, before its model is loaded. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from cacheblend_cli.client import Connection
from cacheblend_cli.errors import UsageError


def bind_tcp(name: str, port: int) -> socket.socket:
    """Return a listening socket, which reserves the address; connections wait until the server runs. Raises UsageError
    if the address is not available."""
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((name, port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {name}:{port}: {error.strerror}", "choose another --port; 0: any free port"
        ) from error
    return bound


def bind_unix(path: Path) -> socket.socket:
    """Return a listening socket for this user only (mode 0600). Replaces a stale one. Raises UsageError if another
    server listens at the path, or the socket cannot be created."""
    if Connection.is_open(path):
        raise UsageError(f"a server already listens on {path}", "see cacheblend ps; end it: cacheblend stop")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    before = os.umask(0o177)
    try:
        if path.exists() and not path.is_socket():
            raise OSError(0, "the path is not a socket")
        new.unlink(missing_ok=True)
        bound.bind(os.fspath(new))
        bound.listen()
        new.rename(path)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {path}: {error.strerror or error}",
            "choose a shorter path in a directory you can write to",
        ) from error
    finally:
        os.umask(before)
    return bound


def inherited() -> socket.socket | None:
    """Return the listening socket that this process was given as its stdin, which is /dev/null afterwards; None without
    one."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        return None
    found = socket.socket(fileno=os.dup(0))
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.close()
        return None
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # or the socket would still listen when the server has ended
    os.close(null)
    return found
