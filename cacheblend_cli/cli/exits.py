"""From exceptions to messages and exit codes: the table of the CLI contract."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import CacheBlendError, ExitCode


def report(error: BaseException, output: Output) -> int:
    """Say on stderr what happened and what to do; returns the exit code."""
    if hasattr(error, "exit_code") and hasattr(error, "message") and hasattr(error, "hint"):
        return _say(output, error.message, error.hint, error.exit_code)  # an error of ours, of any package
    if isinstance(error, KeyboardInterrupt):
        return _say(output, "interrupted", None, ExitCode.INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: no complaint at exit
        return ExitCode.OK
    if hasattr(error, "format_message"):  # the parser's errors, whichever click typer carries
        return _usage(error, output)
    if (known := _foreign(error)) is not None:
        return _say(output, _first_line(error), known[1], known[0])
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return _say(
            output, f"writing failed: {error.strerror}", "free some space where the output goes", ExitCode.INTERNAL
        )
    log = _log(error)
    hint = f"the traceback is in {log}" if log else "the log directory cannot be written: the traceback is above"
    return _say(output, f"a fault of cacheblend: {type(error).__name__}: {_first_line(error)}", hint, ExitCode.INTERNAL)


def _say(output: Output, message: str, hint: str | None, code: int) -> int:
    output.error(message, hint)
    return int(code)


def _usage(error: BaseException, output: Output) -> int:
    """A wrong command, flag or value. Without any argument a group shows its help, which is the message then."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message())  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        output.err.write(message + "\n")
    else:
        path = context.command_path if context is not None else "cacheblend"
        output.error(message[:1].lower() + message[1:].rstrip("."), f"see: {path} --help")
    return int(ExitCode.USAGE)


_LESS = "use fewer chunks, a smaller --max-tokens or --chunk-tokens, or --device cpu"
_FOREIGN = {  # by name, so that nothing is imported to tell
    "OutOfMemoryError": (ExitCode.DEVICE, _LESS),
    "MemoryError": (ExitCode.DEVICE, _LESS),
    "PermissionError": (ExitCode.USAGE, "check its permissions, or name another"),
    "AcceleratorError": (ExitCode.DEVICE, "see what cacheblend doctor says of the GPU, or use --device cpu"),
}


def _foreign(error: BaseException) -> tuple[ExitCode, str] | None:
    """Code and hint for an error of torch or Python that a user can mend."""
    if str(error) == "Could not determine home directory.":
        return ExitCode.USAGE, "set HOME, or write the path without ~"
    names = [kind.__name__ for kind in type(error).__mro__]
    if "RuntimeError" in names and str(error).startswith(("CUDA error", "CUDA driver error")):
        names.insert(0, "AcceleratorError")
    return next((_FOREIGN[name] for name in names if name in _FOREIGN), None)


def _first_line(error: BaseException) -> str:
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _log(error: BaseException) -> Path | None:
    """Write the traceback to a file of this user's; None when that cannot be."""
    from platformdirs import user_log_path

    folder = user_log_path("cacheblend")
    path = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    text = "".join(traceback.format_exception(error))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        with suppress(OSError):
            sys.stderr.write(text)
        return None
    return path


class Interrupted(CacheBlendError):
    """Ctrl-C. The hint says what is there now, and how to go on."""

    exit_code = ExitCode.INTERRUPTED


@contextmanager
def on_interrupt(hint: str) -> Iterator[None]:
    """What a Ctrl-C within is answered with; elsewhere it says "interrupted" alone."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted", hint) from error
