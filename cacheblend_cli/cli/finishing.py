"""Missing KV of `precompute`: computed by a running engine, now or while it is idle."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from cacheblend_cli.cli import options
from cacheblend_cli.cli.keep_alive import DEFAULT_S
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import counted, keep_alive_s
from cacheblend_cli.client import Client
from cacheblend_cli.errors import CacheBlendError, UsageError
from cacheblend_cli.settings import Resolved, Settings
from cacheblend_cli.sockets import socket_of

if TYPE_CHECKING:
    from cacheblend_cli.collect.events import PrecomputeReport

_OWN = ("attention_backend", "threads", "tensor_parallel")  # settings that an engine has of its own


def warm_engine(resolved: Resolved) -> Client | None:
    """Return the running engine that computes the same KV as this process would. None with a tier, to which the engine
    may write nothing, and with flags for the computation itself."""
    if resolved.settings.tier or any(resolved.origin[name] == "flag" for name in _OWN):
        return None
    return Client.of(resolved.settings)


def finish_in_background(resolved: Resolved, report: PrecomputeReport, output: Output) -> None:
    """Let an engine compute the missing KV; start it if none runs. Raises CacheBlendError if it cannot start."""
    from cacheblend_cli.server.background import ask_status, start_own

    settings = resolved.settings
    start_own(settings, keep_alive_s(settings.keep_alive) or DEFAULT_S, options.engine_flags(resolved))
    path = socket_of(settings)
    missing, status = Client(path).finish(settings.salt, on_battery=True), ask_status(path) or {}
    have = f"{report.with_kv:,} of {counted(report.chunks, 'chunk')} have KV"
    engine = f"the engine of process {status.get('pid')}"
    if missing is None:
        raise UsageError(f"{have}; {engine} computes none of them while it is idle", "run it without --background")
    output.note(f"{have}; {engine} computes the rest while it is idle: cacheblend ps")


def after_interrupt(settings: Settings, report: PrecomputeReport) -> str:
    """Say what an interrupted run stored, and who computes the rest: a running engine, if there is one."""
    have = f"{counted(report.chunks, 'chunk')} can be asked already, {report.with_kv:,} have KV"
    with suppress(CacheBlendError):
        client = Client.of(settings)
        if client is not None and client.finish(settings.salt, on_battery=False) is not None:
            return f"{have}; the running engine computes the rest while it is idle (cacheblend ps)"
    return f"{have}; to continue: cacheblend precompute (in the background: --background)"
