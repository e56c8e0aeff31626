"""From exceptions to messages and exit codes: the table of the CLI contract."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import datetime
from pathlib import Path

from platformdirs import user_log_path

from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import CacheBlendError, ExitCode


def report(error: BaseException, output: Output) -> int:
    """Say on stderr what happened and what to do; returns the exit code."""
    if isinstance(error, CacheBlendError):
        output.error(error.message, error.hint)
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        output.error("interrupted; what was committed stays", None)
        return int(ExitCode.INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: no complaint at exit
        return int(ExitCode.OK)
    code = _library_code(error)
    if code is not None:
        output.error(getattr(error, "message", str(error)), getattr(error, "hint", None))
        return int(code)
    log = _log(error)
    output.error(f"a fault of cacheblend ({type(error).__name__}: {error}); the traceback is in {log}", None)
    return int(ExitCode.INTERNAL)


def _library_code(error: BaseException) -> ExitCode | None:
    """Codes for errors of the store, the kernels and torch, looked up only when their packages are loaded."""
    if "cacheblend_store" in sys.modules:
        from cacheblend_store import AmbiguousId, ChunkNotFound, StoreError, StoreNotFound

        if isinstance(error, (ChunkNotFound, AmbiguousId, StoreNotFound)):
            return ExitCode.NOT_FOUND
        if isinstance(error, StoreError):
            return ExitCode.STORE
    if "cacheblend_kernels" in sys.modules:
        from cacheblend_kernels import KernelError

        if isinstance(error, KernelError):
            return ExitCode.DEVICE
    if "torch" in sys.modules:
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            return ExitCode.DEVICE
    return ExitCode.DEVICE if isinstance(error, MemoryError) else None


def _log(error: BaseException) -> Path:
    folder = user_log_path("cacheblend")
    path = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        traceback.print_exception(error)
    return path
