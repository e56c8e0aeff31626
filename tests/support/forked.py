"""Engines in the background that are forks of the test's process, which has imported torch."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from typing import Any

import pytest
from command_line import Cli

from cacheblend_cli.cli.main import run


class Forked:
    def __init__(self, command: list[str], *, stdout: Any, **_: Any) -> None:
        self.pid, self.returncode = os.fork(), 0
        if self.pid == 0:
            code = 1
            gc.freeze()  # what this process has left, such as event loops, would close files that are new here
            try:
                os.setsid()
                for number, end in enumerate(("r", "w", "w")):
                    os.dup2(stdout.fileno() if number else os.open(os.devnull, os.O_RDONLY), number)
                    setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, end))
                logging.getLogger().handlers.clear()  # pytest's, whose files are closed now
                os.closerange(3, 1024)
                code = run(command[4:])
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode if pid else None


def in_background(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Status of the engine that `serve --background` starts."""
    arguments = ("serve", "--background", "--port", "0", "--json")
    monkeypatch.setattr(sys, "argv", ["cacheblend", *arguments])
    started = cli(*arguments)
    assert started.code == 0, started.err
    return dict(json.loads(started.out))
