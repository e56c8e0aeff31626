"""The `cacheblend` command. Importing this module imports neither torch nor transformers nor numpy."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import MutableMapping
from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main
from typer import Option

import cacheblend_cli
from cacheblend_cli.cli.help import Command
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import format_size
from cacheblend_cli.errors import ExitCode, UsageError, did_you_mean

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT = "1000"
"""Spins of an OpenMP thread at a barrier before it sleeps, if other programs are busy. With libgomp's default of about
300,000, a spinning thread takes the core from the thread it waits for. On an idle machine, waking threads costs a fifth
of a token's time (benchmarks/README.md)."""
COMMANDS = {
    "init": ("init:init", "Choose a model for this machine."),
    "precompute": ("precompute:precompute", "Compute and store the KV cache of documents."),
    "ask": ("ask:ask", "Answer a question over stored documents."),
    "search": ("search:search", "Find stored chunks."),
    "chat": ("chat:chat", "Ask follow-up questions in a terminal."),
    "serve": ("serve:serve", "Serve OpenAI's API, and keep the model loaded for ask."),
    "mcp": ("mcp:mcp", "Serve search and ask to MCP clients."),
    "chunks": ("chunks:app", "List, show, check, move and remove stored chunks."),
    "models": ("models:app", "List, describe, check and download models."),
    "config": ("config:app", "Show and change settings."),
    "trust": ("trust:trust", "Accept the settings and the store that a project brings."),
    "doctor": ("doctor:doctor", "Check versions, device, store and model."),
    "demo": ("demo:demo", "Compare blending with full prefill, or write example documents."),
    "bench": ("bench:bench", "Measure speed on this machine."),
    "eval": ("eval:evaluate", "Measure answers against full prefill on your questions."),
}
"""Command -> (module and function or Typer app, summary). Only the module of the command that runs is imported."""
_CHECKS = ("doctor", "demo", "bench", "eval")
_SUBCOMMANDS = {name: f"chunks {name}" for name in ("ls", "show", "stats", "rm", "verify", "prune")} | {
    "pull": "models pull"
}
"""Subcommands that users type without their group -> with it."""
RENAMED = {"sync": "precompute without PATH", "watch": "precompute --watch"}


class _Commands(typer.core.TyperGroup):
    """The top-level commands, each imported when it is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections = {"Commands": [name for name in COMMANDS if name not in _CHECKS], "Checks and measurements": _CHECKS}
        for title, names in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names], col_max=12)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        found = getattr(import_module(f"cacheblend_cli.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            command: Any = typer.main.get_group(found)
        else:
            own = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            own.command(cmd_name, cls=Command)(found)
            command = typer.main.get_command(own)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UsageError for an unknown command, with the new name of a renamed one or the most similar name."""
        name = args[0]
        if name in RENAMED:
            raise UsageError(f"no such command: {name}", f"it is now: cacheblend {RENAMED[name]}")
        if name not in COMMANDS and not name.startswith("-"):
            if name in _SUBCOMMANDS:
                raise UsageError(
                    f"no such command: {name}", f"did you mean {_SUBCOMMANDS[name]}? see: cacheblend --help"
                )
            raise UsageError(f"no such command: {name}", did_you_mean(name, COMMANDS, "cacheblend --help"))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="cacheblend",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Answer questions over documents with a local model. The KV cache of every document chunk is computed once, "
    "stored on disk, and reused in any order.\n\nStart with: cacheblend precompute FOLDER, then cacheblend ask QUESTION.",
)


def _version(value: bool) -> None:
    if value:
        print(f"cacheblend {cacheblend_cli.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def run(arguments: list[str] | None = None) -> int:
    """Run a command (default: sys.argv) and return its exit code."""
    try:
        code = app(arguments, prog_name="cacheblend", standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # the parser caught the Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()  # notice a closed pipe before exit
    except BaseException as error:
        code = _failed(error)
    Output().end_status()
    return code if isinstance(code, int) else 0


def main() -> None:
    """Console script entry point."""
    open_closed_streams()
    ensure_home()
    limit_spinning()
    code = run()
    _finish_writing(interrupted=code == ExitCode.INTERRUPTED)
    sys.exit(code)


def _finish_writing(*, interrupted: bool) -> None:
    """Wait for packed weights that are being written, or cancel that on Ctrl-C."""
    cache = sys.modules.get("cacheblend_cli.model.packed_cache")  # do not import it here
    writers = [] if cache is None else cache.writers()
    if interrupted:
        for writer in writers:
            writer.stop()
        return
    try:
        if writers and sys.stderr.isatty() and not {"-q", "--quiet", "--json"} & set(sys.argv):
            size, folder = format_size(sum(writer.size for writer in writers)), writers[0].path.parent
            Output().note(
                f"writing packed weights for the next start: {size} in {folder} (Ctrl-C cancels; "
                "cacheblend config set weights_cache_gb 0 prevents it)"
            )
        for writer in writers:
            writer.wait()
    except KeyboardInterrupt:
        for writer in writers:
            writer.stop()


class _ClosedStdout(io.StringIO):
    """Standard output closed by the parent process: writing to it is an error."""

    def write(self, text: str) -> int:
        raise UsageError("standard output is closed", "send it to a terminal, a pipe, a file or /dev/null")


def open_closed_streams() -> None:
    """Open standard streams that the parent process closed on /dev/null.

    Otherwise the next opened file, possibly the store, would get the descriptor that messages are written to.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        os.open(os.devnull, os.O_WRONLY)  # takes descriptor 1
        sys.stdout = _ClosedStdout()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def ensure_home() -> None:
    """Set HOME to a nonexistent directory for accounts without one (containers with a numeric user)."""
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = "/nonexistent"


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set a short spin count if other programs need the CPUs, unless the user set one of VARIABLES.

    Call before torch loads libgomp, which reads it once.
    """
    if not any(name in environment for name in VARIABLES) and _cpus_are_short():
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT


def _cpus_are_short(stat: str = "/proc/stat") -> bool:
    """Return whether other processes use the CPUs of this process; also True if unknown, or under a CPU quota."""
    try:
        others = min(_running_threads(stat) for _ in range(3)) - 1  # ignore short-lived threads
        own, count = len(os.sched_getaffinity(0)), os.cpu_count() or 1
        if others < 0 or (own < count and others) or _has_quota():
            return True
        return others + own > count
    except (OSError, IndexError, ValueError, AttributeError):
        return True


def _has_quota(limit: str = "/sys/fs/cgroup/cpu.max") -> bool:
    """Return whether the control group has a CPU quota."""
    try:
        with open(limit, encoding="ascii") as line:
            return not line.read().startswith("max")
    except OSError:
        return False


def _running_threads(stat: str) -> int:
    """Return the number of runnable threads, including this one."""
    with open(stat, encoding="ascii") as lines:
        return int(next((line for line in lines if line.startswith("procs_running")), "").split()[1])


def _failed(error: BaseException) -> int:
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        if isinstance(error.__context__, BrokenPipeError):  # the parser exits like this on a closed pipe
            error = error.__context__
        else:
            return error.code if isinstance(error.code, int) else 1
    if isinstance(error, typer.Abort):
        error = KeyboardInterrupt()
    from cacheblend_cli.cli.exits import report

    return report(error, Output())
