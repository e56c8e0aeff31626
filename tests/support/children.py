"""Forked children that can be killed, or that report the outcome of work which may end in a signal."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


class Child:
    """A forked process that runs work(acknowledge). Each acknowledge() writes a byte that outlives the process."""

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._pipe, end = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            status = 1
            try:
                work(lambda: _write_byte(end))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(end)

    def until(self, acknowledged: int, timeout: float = 60.0) -> None:
        """Wait for this many acknowledgements, or for the end of the process. RuntimeError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while _bytes_in(self._pipe) < acknowledged:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the child has not acknowledged {acknowledged} times in {timeout:.0f} s")
            time.sleep(0.001)

    def kill(self) -> int:
        """Send SIGKILL.

        Return the number of acknowledgements. RuntimeError if the process had already failed by itself.
        """
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status) != 0:
            raise RuntimeError(f"the child failed before it was killed: exit status {status}")
        return self._count()

    def wait(self, timeout: float = 60.0) -> tuple[int, int]:
        """Return (exit code, negative for a signal; acknowledgements). Killed with SIGALRM after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status), self._count()
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGALRM)
                _, status = os.waitpid(self.pid, 0)
                return -signal.SIGALRM, self._count()
            time.sleep(0.002)

    def _count(self) -> int:
        total = 0
        while data := os.read(self._pipe, 1 << 16):
            total += len(data)
        os.close(self._pipe)
        return total


def _bytes_in(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _write_byte(end: int) -> None:
    os.write(end, b".")


def outcomes(work: Callable[[Any], Any], items: Iterable[Any], timeout: float) -> Iterator[tuple[Any, Any]]:
    """Yield (item, work(item)) for each item, run in forked children. Results are sent as JSON.

    If a child dies, the result is Ended("signal SIGSEGV"), Ended("no answer in 20 s"), or Ended("exception ...") if
    `work` raised. The remaining items continue in a new child.
    """
    todo = list(items)
    while todo:
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            try:
                for item in todo:
                    try:
                        data = json.dumps([work(item)]).encode()
                    except BaseException as error:
                        data = json.dumps({"ended": f"exception {type(error).__name__}: {error}"}).encode()
                    _write_all(write_end, len(data).to_bytes(4, "little") + data)
            finally:
                os._exit(0)
        os.close(write_end)
        done, ended = 0, ""
        while done < len(todo):
            answer = _answer(read_end, timeout)
            if isinstance(answer, str):
                ended = answer
                break
            yield todo[done], (answer[0] if isinstance(answer, list) else Ended(answer["ended"]))
            done += 1
        if ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(read_end)
        if ended == "gone":
            code = os.waitstatus_to_exitcode(status)
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if done < len(todo):
            yield todo[done], Ended(ended)
        todo = todo[done + 1 :]


def limit_memory(num_bytes: int = 200 << 20) -> None:
    """Limit the address space of this process to its current size plus num_bytes. More raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, hard))


class Ended(str):
    """Describe how a child ended without a result."""


def _answer(pipe: int, timeout: float) -> list[Any] | dict[str, str] | str:
    deadline, data, wanted = time.monotonic() + timeout, b"", 4
    while len(data) < wanted:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return f"no answer in {timeout:.0f} s"
        more = os.read(pipe, wanted - len(data))
        if not more:
            return "gone"
        data += more
        if len(data) == 4:
            wanted = 4 + int.from_bytes(data, "little")
    answer: list[Any] | dict[str, str] = json.loads(data[4:])
    return answer


def _write_all(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]
