"""cacheblend ps and stop: the running engines of this user. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import Any

from typer import Option

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import counted, format_seconds, format_size
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.server.background import RunningEngine, engines, stop_all
from cacheblend_cli.settings import Settings
from cacheblend_cli.version import __version__

_GRACE_S = 30.0  # of `serve`, for running answers


@options.with_settings("store")
def ps(settings: Settings, json: options.Json = False) -> None:
    """List this user's engines that stay loaded, over any store: those of `serve` and of keep_alive.

    Lines of --json have pid, model, store, version, socket, memory_bytes and state: idle, busy, loading, ending, "not
    responding" or "store gone". Of an engine that responds also idle_s, idle_exit_s (0: never), own (started by
    another command), url, up_s, protocol and counts.
    """
    output = Output(json=json)
    found = engines(settings, everywhere=True)
    for engine in found:
        output.json(engine.facts)
    if not found:
        output.note("no engine is running")
    elif not json:
        rows = [_row(engine) for engine in found]
        output.table(("pid", "model", "store", "memory", "state", "until"), rows, right=(3,), ends=(2,))


@options.with_settings("store")
def stop(
    settings: Settings,
    everywhere: bool = Option(False, "--all", help="Stop all engines of this user, over any store."),
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Stop the engines over this store, those of `serve` too. Running answers have 30 seconds to finish.

    If none runs, it says so and exits with 0; serve --stop exits with 3.
    """
    output = Output(json=json, quiet=quiet)
    try:
        stopped = stop_all(settings, _GRACE_S, everywhere=everywhere)
    except NotFoundError as error:
        others = f"; over other stores: {count}" if (count := len(engines(settings, everywhere=True))) else ""
        output.note(f"{error.message}{others} (cacheblend stop --all)" if others else "no engine is running")
        return
    for engine in stopped:
        facts = {name: engine.facts[name] for name in ("pid", "model", "store")}
        text = f"stopped {facts['model']} over {shown(facts['store'] or 'a store')} (process {facts['pid']})"
        output.result({**facts, "stopped": True}, text)


def _row(engine: RunningEngine) -> list[str]:
    facts = engine.facts
    memory = "" if facts["memory_bytes"] is None else format_size(facts["memory_bytes"])
    pid, model, store = (str(facts[name] or "") for name in ("pid", "model", "store"))
    return [pid, model, shown(store), memory, _state(facts), _until(facts)]


def _state(facts: dict[str, Any]) -> str:
    state = facts["state"]
    if state == "busy":
        state = f"answering {facts['running'] + facts['waiting']}"
    elif state == "idle":
        is_computing = facts.get("computing", False)
        state = "computing" if is_computing else f"idle {format_seconds(facts['idle_s'])}"
        state += f", {counted(facts['missing'], 'chunk')} left" if facts.get("missing") else ""
    other = facts["version"] not in (None, __version__)
    return f"{state}, version {facts['version']}: not used" if other else state


def _until(facts: dict[str, Any]) -> str:
    """Return when an engine ends without further requests."""
    exit_s = facts.get("idle_exit_s")
    if exit_s is None:
        return ""
    return f"in {format_seconds(max(0.0, exit_s - facts['idle_s']))}" if exit_s else "stopped"
