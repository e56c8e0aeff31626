"""Ctrl-C at any moment of a command. Imports little: the handler is set before typer is imported."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from cacheblend_cli.errors import ExitCode

_ERASE_LINE = "\r\x1b[2K"
_SHOW_CURSOR = "\x1b[?25h"


def handle_interrupts() -> None:
    """Set the handler of this process, unless it ignores SIGINT, as in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end the process while a module is imported.

    An extension module that is being imported may ignore an exception, replace it or abort, as torch and numpy do.
    Ending the process during an import loses no data.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end()
        frame = frame.f_back
    raise KeyboardInterrupt


def end() -> NoReturn:
    """Print one line and end the process at once, with no clean-up by modules that are half imported. Writes past
    sys.stderr, which the interrupted code may be writing to."""
    shown = getattr(sys.modules.get("cacheblend_cli.cli.output"), "Output", None)
    on_bar = getattr(shown, "_bar_shown", False)
    with suppress(OSError):
        os.write(2, f"{_ERASE_LINE + _SHOW_CURSOR if on_bar else ''}interrupted\n".encode())
    os._exit(ExitCode.INTERRUPTED)
