"""Read-only mapping of a file of weights, shared by all tensors that are read from it."""

from __future__ import annotations

import mmap
import os
import stat
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from cacheblend_kernels import compiled

from cacheblend_cli.errors import ExitCode, UsageError

AGAIN = "fetch it again"


class MappedFile:
    """Bytes of a file in place: whoever holds an address has to hold the mapping too.

    The pages are the page cache's, shared with other processes, and are read on access. If the file shrinks or its disk
    fails meanwhile, the process ends with a message and exit code 2; without compiled code it ends by SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Map a file. Raises UsageError if it cannot be read, is not a regular file, or is empty."""
        self.path = path
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO waits for its writer
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from error
        try:
            self.status = os.fstat(handle)
            """Size, time and inode of the file that is mapped; another one may have its name by now."""
            self.size = self.status.st_size
            if not stat.S_ISREG(self.status.st_mode):
                raise UsageError(f"{path} is not a regular file", "give the file itself, or a link to it")
            if not self.size:
                raise UsageError(f"{path} is empty", AGAIN)
            self._memory = mmap.mmap(handle, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:  # it shrank after it was opened
            raise UsageError(f"{path} cannot be mapped: {error}", AGAIN) from error
        finally:
            os.close(handle)
        self._start: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        number = compiled.guard_mapping(self._start, self.size, _message(path), ExitCode.USAGE)
        if number is not None:  # runs before the memory is unmapped; at exit, other threads may still read it
            weakref.finalize(self, compiled.unguard_mapping, number).atexit = False

    def address(self, offset: int, num_bytes: int) -> int:
        """Return the address of a range of the file. Raises UsageError if it is not inside the file."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.size:
            raise UsageError(
                f"bytes {offset:,} to {offset + num_bytes:,} are not inside {self.path}, which has {self.size:,}", AGAIN
            )
        return self._start + offset


def overlap(ranges: Iterable[tuple[int, int, str]]) -> tuple[str, str] | None:
    """Return the names of two ranges (begin, end, name) of a file that share bytes; None if there are none."""
    last, of_last = 0, ""
    for begin, end, name in sorted(ranges):
        if begin < last and begin < end:
            return of_last, name
        if end > last:
            last, of_last = end, name
    return None


def _message(path: Path) -> bytes:
    """Return the line that a failed read ends the process with. A terminal's current line is erased first."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path))
    erase = "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""
    text = f"{erase}error: {shown} became shorter or unreadable while it was mapped; {AGAIN}\n"
    return text.encode(errors="backslashreplace")
