"""Untrusted input, processed in another process with limits of CPU time and memory.

Hostile or broken input kills that process, not the caller. The caller has a `LimitedProcess` for a module; run as
`python -m`, the module calls `serve` and works within `limits`. The process ends with its caller, even a killed one.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Protocol

MIB = 1 << 20
_SIZE = 8
"""Bytes of a message's length field."""
_MORE, _LAST, _LAST_AND_END = 0, 1, 2
"""First byte of an answer: another one follows, none follows, and the process is to be ended."""
_KEPT_MIB = 512
"""Peak resident memory (MiB) above which the process ends after an answer, to free its memory."""


class ProcessEnded(Exception):
    """The process ended without an answer. status: its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"signal {-status}" if status < 0 else f"status {status}")
        self.status = status

    @property
    def is_too_slow(self) -> bool:
        """Return whether the CPU time was used up."""
        return self.status == -signal.SIGPROF

    @property
    def is_step_too_slow(self) -> bool:
        """Return whether the CPU time of a `limited_step` was used up."""
        return self.status == -signal.SIGVTALRM


class Cancellation(Protocol):
    """Cancels work from another thread."""

    def ended_by(self, act: Callable[[], object]) -> AbstractContextManager[None]:
        """Call `act` if the work is cancelled inside this context. Raises an error of its own if it was cancelled."""


class LimitedProcess:
    """Another process that answers messages, one at a time.

    It starts with the first message, again after it ended, and ends with this object. After a fork, the
    child starts a process of its own.
    """

    def __init__(self, module: str, greeting: Callable[[], bytes] | None = None) -> None:
        """module: its name; it calls `serve` when it is run. greeting: returns what every process of this object reads
        first, by `receive_greeting`."""
        self._module, self._greeting = module, greeting
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None
        _ALL.add(self)

    def ask(self, message: bytes, cancellation: Cancellation | None = None) -> bytes:
        """Return the answer to a message that has one. A cancellation kills the process. Raises
        ProcessEnded."""
        [answer] = self.stream(message, cancellation)
        return answer

    def stream(self, message: bytes, cancellation: Cancellation | None = None) -> Iterator[bytes]:
        """Yield the answers to a message. A cancellation kills the process. Raises ProcessEnded.

        Until the last answer, the process takes no other message; leaving the iterator early ends the process.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # killed while it waited
                self._stop()
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            state = _MORE
            try:
                # this process: one that starts after the cancellation would not be killed
                with nullcontext() if cancellation is None else cancellation.ended_by(process.kill):
                    _send(process.stdin, message)
                    while state == _MORE:
                        answer = _receive(process.stdout)
                        state = answer[0]
                        if state == _LAST_AND_END:
                            self._stop()
                        yield answer[1:]
            except (BrokenPipeError, EOFError):
                status = process.wait()
                self._stop()
                raise ProcessEnded(status) from None
            except BaseException:  # an interrupt or cancellation may leave a part of a message in the pipes
                if state == _MORE:
                    self._stop()
                raise

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            watched, held = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
            with watched:
                # -P: do not import modules from the current directory, which may be a folder of documents
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, str(watched.fileno())],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[watched.fileno()],
                )
            self._finalizer = weakref.finalize(self, _stop, self._process, held)
            if self._greeting is not None and self._process.stdin is not None:
                with suppress(BrokenPipeError):  # the first message tells
                    _send(self._process.stdin, self._greeting())
        return self._process

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def forget(self) -> None:
        """Leave the process to the parent, after a fork."""
        self._lock = threading.Lock()
        if self._process is not None and self._finalizer is not None and (alive := self._finalizer.detach()):
            self._process.returncode = 0
            _close(*alive[2])
        self._process = self._finalizer = None


_ALL: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for process in list(_ALL):
        process.forget()


os.register_at_fork(after_in_child=_forget_all)


def _stop(process: subprocess.Popen[bytes], held: IO[bytes]) -> None:
    process.kill()
    _close(process, held)
    process.wait()


def _close(process: subprocess.Popen[bytes], held: IO[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, held):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _send(stream: IO[bytes], message: bytes) -> None:
    for part in (len(message).to_bytes(_SIZE, "big"), message):
        left = memoryview(part)
        while left:
            left = left[stream.write(left) :]
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """Read one message. Raises EOFError at the end of the stream."""
    return _read(stream, int.from_bytes(_read(stream, _SIZE), "big"))


def _read(stream: IO[bytes], count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = stream.read(min(count - len(found), MIB))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def receive_greeting() -> bytes:
    """Return the message that a process is greeted with, before it serves."""
    return _receive(sys.stdin.buffer)


def serve(answer: Callable[[bytes], bytes | Iterable[bytes]]) -> None:
    """Answer the messages on stdin until the caller closes its end. A message may have several answers.

    What else the process prints goes to stderr, and its own stdin is empty.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the caller's
    messages, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdin = open(os.devnull)  # noqa: SIM115
    with suppress(EOFError, BrokenPipeError):
        _end_with_caller()
        while True:
            found = answer(_receive(messages))
            last: bytes | None = None
            for part in (found,) if isinstance(found, bytes) else found:
                if last is not None:
                    _send(answers, bytes([_MORE]) + last)
                last = part
            assert last is not None, "a message has an answer"
            _send(answers, bytes([_LAST_AND_END if peak_mib() > _KEPT_MIB else _LAST]) + last)


def _end_with_caller() -> None:
    """End this process when the caller ends, even inside C code: the pipe's other end then closes, and the kernel sends
    SIGIO, which terminates a process that does not handle it. Nothing is written to this pipe: data raises SIGIO too,
    even after it was read."""
    pipe = int(sys.argv[1])
    if hasattr(os, "O_ASYNC"):
        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, 0)  # a hang-up is reported always
    if poll.poll(0):  # closed before it was watched
        raise EOFError


@contextmanager
def limits(seconds: float, memory: int) -> Iterator[None]:
    """Limit this process to seconds of CPU time and bytes of address space. SIGPROF ends it when the time is used up,
    even inside C code; memory beyond the limit is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def limited_step(seconds: float) -> Iterator[None]:
    """Within `limits`, limit a step that normally takes far less CPU time, also inside C code: SIGVTALRM ends the
    process. Elsewhere a step has no limit."""
    if not any(signal.getitimer(signal.ITIMER_PROF)):
        yield
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def peak_mib() -> float:
    """Return the peak resident memory of this process in MiB."""
    with suppress(OSError, StopIteration):  # Linux's ru_maxrss begins with that of the process which started this one
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1 << 10)
