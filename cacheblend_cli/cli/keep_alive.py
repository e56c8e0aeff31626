"""The engine that a command leaves running after its answer."""

from __future__ import annotations

import os

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import format_seconds, format_size, keep_alive_s
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.host_memory import is_short_for
from cacheblend_cli.model.named import default_model
from cacheblend_cli.settings import Resolved

DEFAULT_S = 300.0


def leave_engine(resolved: Resolved, output: Output, memory: int | None, *, on_gpu: bool) -> None:
    """Start an engine for the next questions, unless keep_alive is off, memory is short, or the last start failed. Does
    not wait for it, and ignores failures. memory: bytes that the engine takes."""
    settings = resolved.settings
    seconds = keep_alive_s(settings.keep_alive) if settings.keep_alive else DEFAULT_S * _is_attended(output)
    if not seconds or "RANK" in os.environ or is_short_for(memory or 0):  # RANK: torchrun's
        return
    from cacheblend_cli.server.background import spawn_own, start_error

    try:
        if error := start_error(settings):
            note = f"no engine stays loaded for the next questions, its last start failed: {error}"
        elif spawn_own(settings, seconds, options.engine_flags(resolved)) is not None:
            name, time = settings.model or default_model(), format_seconds(seconds).replace(".0 ", " ")
            size = f" ({format_size(memory)})" if memory else ""
            if on_gpu:
                size = f" (with {settings.gpu_memory_utilization:.0%} of the GPU's memory)"
            note = f"{name} stays loaded for {time}{size} for the next questions; end it: cacheblend stop"
        else:
            return
        options.hint(output, note, name=f"stays loaded: {bool(error)}", daily=True)
    except (CacheBlendError, OSError):  # such as a full disk
        pass


def _is_attended(output: Output) -> bool:
    """Return whether a person sits at the terminal: not CI, sudo, or the entry point of a container."""
    is_sudo = "SUDO_UID" in os.environ and os.geteuid() == 0
    return output.err_tty and not (os.environ.get("CI") or is_sudo or 1 in (os.getpid(), os.getppid()))
