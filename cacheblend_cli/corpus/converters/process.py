"""Convert files in a separate process with memory and CPU limits. A hostile or broken file kills that process, not the
caller.

Parsers of PDF, Office, HTML and e-mail can take hours or all memory for some files of a few kilobytes.
`ConverterProcess` sends the bytes of a file to `python -m` this module and receives the text. Only plain text is
decoded in the caller's process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from cacheblend_cli.corpus.converters import PLAIN, converter_of
from cacheblend_cli.corpus.converters.converter import NoDocument, encodable, from_plain
from cacheblend_cli.corpus.layout import Converted

MIB = 1 << 20
_SIZE = 8
"""Bytes of a message's length field."""
_KEPT_MIB = 512
"""Peak resident memory (MiB) above which the process ends after a file."""


class ConversionLimits(msgspec.Struct, frozen=True):
    """Limits for converting one file."""

    seconds: float = 120  # CPU time
    seconds_per_mib: float = 10  # additional CPU time per MiB of the file
    memory: int = 1 << 30  # address space, bytes
    memory_per_byte: int = 8  # additional address space per byte of the file
    characters: int = 64 * MIB  # maximum length of the converted text

    def seconds_for(self, size: int) -> float:
        return self.seconds + self.seconds_per_mib * size / MIB


class _Job(msgspec.Struct):
    name: str
    limits: ConversionLimits
    data: bytes = b""


class _Result(msgspec.Struct):
    """Converted text, or the arguments of a NoDocument."""

    converted: Converted | None = None
    reason: str = ""
    group: str = ""
    unread: bool = False
    ends: bool = False  # the process should end now, to free its memory


class ConverterProcess:
    """Converts files in another process.

    The process starts with the first file that needs it and ends with this object.
    """

    def __init__(self, limits: ConversionLimits | None = None) -> None:
        self._limits = limits or ConversionLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def convert(self, name: str, data: bytes) -> Converted:
        """Convert the bytes of a file.

        The name selects the converter; unknown names are plain text. Raises NoDocument.
        """
        converter = converter_of(name) or from_plain
        if converter in PLAIN:
            return converter(data)
        with self._lock:
            return self._converted(_Job(name, self._limits, data))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _converted(self, job: _Job) -> Converted:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = None
        with suppress(BrokenPipeError, EOFError):
            _send(process.stdin, msgspec.msgpack.encode(job))
            answer = msgspec.msgpack.decode(_receive(process.stdout), type=_Result)
        if answer is None or answer.ends:
            status = self._end()
        if answer is None:
            raise self._refusal(status, len(job.data))
        if answer.converted is None:
            raise NoDocument(answer.reason, answer.group, unread=answer.unread)
        return answer.converted

    def _refusal(self, status: int, size: int) -> NoDocument:
        """Return the error for a process that ended without an answer."""
        if status == -signal.SIGPROF:
            seconds = self._limits.seconds_for(size)
            return NoDocument(
                f"takes more than {seconds:,.0f} s to convert; store its text instead", "too slow to convert"
            )
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return NoDocument(f"its converter crashed ({how}); store its text instead", "damaged or locked")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():  # after a fork the pipes belong to the parent
            # -P: do not import modules from the current directory, which may be a folder of documents
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
            weakref.finalize(self, _ended, self._process)
        return self._process

    def _end(self) -> int:
        process, self._process = self._process, None
        return 0 if process is None or self._owner != os.getpid() else _ended(process)


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Close the process's pipes, which ends it, and return its exit status."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    return process.wait()


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(_SIZE, "big"))
    stream.write(message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """Read one message. Raises EOFError at the end of the stream."""
    head = stream.read(_SIZE)
    message = stream.read(int.from_bytes(head, "big")) if len(head) == _SIZE else b""
    if not head or len(message) != int.from_bytes(head, "big"):
        raise EOFError
    return message


def _convert(job: _Job) -> _Result:
    """Convert within the limits. SIGPROF ends the process when its CPU time is used up, even inside C code."""
    memory = job.limits.memory + job.limits.memory_per_byte * len(job.data)
    converter = converter_of(job.name)
    assert converter is not None
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, job.limits.seconds_for(len(job.data)))
    try:
        converted = encodable(converter(job.data))
        if len(converted.text) > job.limits.characters:
            most = f"{job.limits.characters / MIB:.3g} MB"
            return _Result(reason=f"has more than {most} of text", group="too large unpacked")
        return _Result(converted)
    except NoDocument as no:
        return _Result(reason=no.reason, group=no.group, unread=no.unread)
    except MemoryError:
        return _Result(reason=f"needs more than {memory // MIB:,} MiB of memory to convert", group="too large unpacked")
    except RecursionError:
        return _Result(reason="is nested too deeply", group="damaged or locked")
    except Exception as error:
        return _Result(reason=f"cannot be converted: {error or type(error).__name__}"[:120], group="damaged or locked")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def peak_mib() -> float:
    """Return the peak resident memory of this process in MiB."""
    with suppress(OSError, StopIteration):  # Linux's ru_maxrss begins with that of the process which started this one
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1 << 10)


def _serve(jobs: IO[bytes], results: IO[bytes]) -> None:
    """Convert files until the caller closes its end."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(EOFError, BrokenPipeError):
        while True:
            job = msgspec.msgpack.decode(_receive(jobs), type=_Job)
            result = _convert(job)
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_AS, unlimited)
            del job
            result.ends = peak_mib() > _KEPT_MIB
            _send(results, msgspec.msgpack.encode(result))


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
