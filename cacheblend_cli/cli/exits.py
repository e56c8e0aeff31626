"""Convert exceptions to messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cacheblend_store.private_files import make_folder, open_file
from platformdirs import user_log_path

from cacheblend_cli.cli.flags import instead_of
from cacheblend_cli.cli.output import Output, visible
from cacheblend_cli.errors import CacheBlendError, ExitCode, did_you_mean


def report(error: BaseException, output: Output) -> int:
    """Print an error and its hint on stderr, and return the exit code."""
    if isinstance(error, KeyboardInterrupt | Interrupted):
        hint = getattr(error, "hint", None)
        output.plain(f"interrupted; {hint}" if hint else "interrupted")
        return ExitCode.INTERRUPTED
    if hasattr(error, "exit_code") and hasattr(error, "message") and hasattr(error, "hint"):
        # CacheBlendError, StoreError and others of this project
        output.error(error.message, error.hint)
        return int(error.exit_code)
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return ExitCode.OK
    if hasattr(error, "format_message"):  # errors of typer's parser
        return _usage(error, output)
    if (known := _foreign(error)) is not None:
        output.error(_first_line(error), known[1])
        return known[0]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _discard_output()
        output.error(f"writing failed: {error.strerror}", "free some space where the output goes")
        return ExitCode.USAGE
    log = _log(error)
    hint = f"the traceback is in {log}" if log else "the log directory cannot be written: the traceback is above"
    output.error(f"internal error: {type(error).__name__}: {_first_line(error)}", hint)
    return ExitCode.INTERNAL


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: BaseException, output: Output) -> int:
    """Print a usage error of the parser, or the help of a command group without a subcommand."""
    if type(error).__name__ == "NoSuchOption" and (known := instead_of(error.option_name)):  # type: ignore[attr-defined]
        return report(known, output)
    message = str(error.message if getattr(error, "possibilities", None) else error.format_message())  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        output.err.write(message + "\n")
    else:
        output.error(message[:1].lower() + message[1:].rstrip("."), _hint(error, message))
    return ExitCode.USAGE


def _hint(error: Any, message: str) -> str:
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "cacheblend"
    if getattr(error, "possibilities", None):
        return did_you_mean(error.option_name, error.possibilities, f"{path} --help")
    kind = type(error).__name__
    parameter: Any = getattr(error, "param", None)
    if kind == "BadOptionUsage" and "requires an argument" in message:
        return f"write a value after it: {error.option_name} VALUE"
    if kind == "MissingParameter" and context is not None:
        words = [p.human_readable_name.upper() for p in context.command.params if p.param_type_name == "argument"]
        return f"write: {path} {' '.join(words)}"
    if kind == "BadParameter" and getattr(parameter, "help", None):
        name = max(parameter.opts, key=len)
        return f"{name}: {parameter.help[:1].lower()}{parameter.help[1:].rstrip('.')}"
    if kind == "NoSuchOption" and any("--help-all" in p.opts for p in context.command.get_params(context)):
        return f"see: {path} --help-all"
    quotes = "put text with spaces in quotes; " if message.startswith("Got unexpected extra argument") else ""
    return f"{quotes}see: {path} --help"


_USE_LESS_MEMORY = "use fewer chunks, a smaller --max-tokens or --chunk-tokens, or --device cpu"
_FOREIGN = {  # by name, to avoid imports
    "OutOfMemoryError": (ExitCode.DEVICE, _USE_LESS_MEMORY),
    "MemoryError": (ExitCode.DEVICE, _USE_LESS_MEMORY),
    "PermissionError": (ExitCode.USAGE, "check its permissions, or choose another path"),
    "AcceleratorError": (ExitCode.DEVICE, "cacheblend doctor describes the GPU; --device cpu does not use it"),
}


def _foreign(error: BaseException) -> tuple[ExitCode, str] | None:
    """Return exit code and hint for an error of torch or Python that a user can fix."""
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
    """Write the traceback to the user's log directory and return the file. If that fails, print it and return None."""
    folder = user_log_path("cacheblend")
    path = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    text = "".join(traceback.format_exception(error))
    try:
        make_folder(folder)
        with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        with suppress(OSError):
            sys.stderr.write(visible(text) if sys.stderr.isatty() else text)
        return None
    return path


class Interrupted(CacheBlendError):
    """Ctrl-C. hint: what is kept, and how to continue."""

    exit_code = ExitCode.INTERRUPTED


@contextmanager
def on_interrupt(hint: str | Callable[[], str]) -> Iterator[None]:
    """Add a hint to the message of a Ctrl-C inside the block."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted", hint if isinstance(hint, str) else hint()) from error
