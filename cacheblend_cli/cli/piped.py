"""Text that is piped or redirected to `ask` beside a question: `cat notes.md | cacheblend ask "..."`.

A command with its question as an argument often inherits a stdin meant for something else: a terminal, the rest of a
`while read` loop's input, the script that a shell is reading, a pipe without a writer. Such a stdin is left alone:

- Only a regular file that is not at its end, a pipe and a socket are read.
- Stdin belongs to the calling process if that has the same one. Programs that only start others, such as `timeout`,
  do not count. This needs /proc; without it, a file is read only from its beginning.
- A pipe that stays silent for WAIT_S is not read, unless another command of the same pipeline writes to it, such as a
  slow download. One that is written to is read to its end.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cacheblend_cli.errors import PromptTooLong, UsageError
from cacheblend_cli.text_files import decode_text

WAIT_S = 3.0
MAX_BYTES = 20 << 20
_STORE_IT = "store the text, and ask without the pipe: cacheblend precompute FILE"
_OWNED = "stdin is not read as a document, since {} reads it, too (to use it: cat | cacheblend ask ...)"
_STARTERS = frozenset(
    "chrt doas env flock hatch ionice nice nohup pdm pipx poetry prlimit pyenv rye setsid stdbuf strace sudo taskset time timeout uv uvx".split()
)
"""Programs that start another one and leave stdin to it."""


def piped_text(note: Callable[[str], None], warn: Callable[[str], None]) -> str | None:
    """Return the text on stdin, None if there is none or it is not for this command.

    note, warn: called with the reason for not reading stdin, if it may have a text. Raises UsageError for text that is
    not UTF-8 or too long.
    """
    if (data := _piped_bytes(note, warn)) is None:
        return None
    if len(data) > MAX_BYTES:
        raise UsageError(f"stdin has more than {MAX_BYTES >> 20} MiB, too much for a prompt", _STORE_IT)
    text = decode_text(data, "stdin")
    return text if text.strip() else None


@contextmanager
def in_prompt(text: str | None) -> Iterator[None]:
    """Add a hint for a piped text that does not fit the prompt."""
    try:
        yield
    except PromptTooLong as error:
        raise PromptTooLong(error.message, error.hint if text is None else _STORE_IT) from error


def _piped_bytes(note: Callable[[str], None], warn: Callable[[str], None]) -> bytes | None:
    if sys.stdin is None or sys.stdin.closed:
        return None
    try:
        descriptor = sys.stdin.fileno()
    except OSError:  # not a file descriptor: text that a program passes to this one in memory
        with suppress(OSError):
            return sys.stdin.buffer.read(MAX_BYTES + 1)
        return None
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    if stat.S_ISREG(status.st_mode):
        return _file_bytes(descriptor, status, note)
    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
        return _pipe_bytes(descriptor, status, note, warn)
    return None


def _file_bytes(descriptor: int, status: os.stat_result, note: Callable[[str], None]) -> bytes | None:
    if (at := os.lseek(descriptor, 0, os.SEEK_CUR)) >= status.st_size:
        return None
    owner = _owner_of(status) or ("the calling process" if at and not Path("/proc/self").exists() else None)
    if owner is None:
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    note(_OWNED.format(owner))
    return None


def _pipe_bytes(
    descriptor: int, status: os.stat_result, note: Callable[[str], None], warn: Callable[[str], None]
) -> bytes | None:
    owner = _owner_of(status)
    is_silent = not select.select([descriptor], [], [], 0 if owner else WAIT_S)[0]
    if is_silent and owner is None and _has_writer(status):
        note("waiting for the text on stdin")
        is_silent = False
    if owner is not None:
        if not is_silent and _num_waiting(descriptor):
            note(_OWNED.format(owner))
        return None
    if is_silent:
        warn(f"stdin is an open pipe that was silent for {WAIT_S:g} s: it is not read (< /dev/null saves the wait)")
        return None
    return sys.stdin.buffer.read(MAX_BYTES + 1)


def _owner_of(own: os.stat_result) -> str | None:
    """Return the name of the calling process if it has the same stdin, None if it has another or cannot be asked."""
    process = os.getppid()
    while True:
        try:
            its = os.stat(f"/proc/{process}/fd/0")
            text = Path(f"/proc/{process}/stat").read_text(errors="replace")
            name, _, fields = text.partition("(")[2].rpartition(") ")
        except OSError:
            return None
        if (its.st_dev, its.st_ino) != (own.st_dev, own.st_ino):
            return None
        if name not in _STARTERS:
            return name
        process = int(fields.split()[1])


def _has_writer(pipe: os.stat_result) -> bool:
    """Return whether a process of the same group that did not start this one, as in a shell's pipeline, has the pipe
    open to write to it."""
    for process in Path("/proc").glob("[0-9]*"):
        number = int(process.name)
        with suppress(OSError):
            if number in (os.getpid(), os.getppid()) or os.getpgid(number) != os.getpgrp():
                continue
            for descriptor in (process / "fd").iterdir():
                its = descriptor.stat()
                if (its.st_dev, its.st_ino) == (pipe.st_dev, pipe.st_ino) and descriptor.lstat().st_mode & stat.S_IWUSR:
                    return True
    return False


def _num_waiting(descriptor: int) -> int:
    """Return how many bytes can be read at once: 0 at the end of a pipe."""
    import fcntl
    import termios

    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0
