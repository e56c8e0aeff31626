"""Kill a limited process after it was given a message."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest
from cacheblend_documents import limited_process


@contextmanager
def killed_at_work(process: limited_process.LimitedProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kill the process whenever its answer is awaited."""
    send = limited_process._send

    def send_and_kill(stream: IO[bytes], message: bytes) -> None:
        assert process._process is not None
        pid = process._process.pid
        os.kill(pid, signal.SIGSTOP)
        send(stream, message)
        os.kill(pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(limited_process, "_send", send_and_kill)
        yield
