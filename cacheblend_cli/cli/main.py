"""The `cacheblend` command. Importing this module imports neither torch nor transformers nor numpy."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

import cacheblend_cli
from cacheblend_cli.cli.help import Command
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import ExitCode

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT = "1000"
"""How long a thread of OpenMP's spins at a barrier before it sleeps. libgomp's own is some 300,000: beside busy programs a
thread that spins takes the core from the one it waits for (benchmarks/README.md)."""
_HOMES = {
    "precompute": "precompute:precompute",
    "sync": "sync:sync",
    "watch": "sync:watch",
    "ask": "ask:ask",
    "search": "search:search",
    "chat": "chat:chat",
    "serve": "serve:serve",
    "chunks": "chunks:app",
    "models": "models:app",
    "bench": "bench:bench",
    "eval": "eval:evaluate",
    "demo": "demo:demo",
    "doctor": "doctor:doctor",
    "config": "config:app",
    "init": "init:init",
}
"""Command -> the module of this package and its function, or the group's app: only the one that runs is imported."""


class _Commands(typer.core.TyperGroup):
    """The commands, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_HOMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _HOMES:
            return None
        module, _, name = _HOMES[cmd_name].partition(":")
        found = getattr(import_module(f"cacheblend_cli.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            command: Any = typer.main.get_group(found)
        else:
            own = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            own.command(cmd_name, cls=Command)(found)
            command = typer.main.get_command(own)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="cacheblend",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Answer questions over documents whose KV cache is computed once, reused in any order, and repaired.",
)


def _version(value: bool) -> None:
    if value:
        print(f"cacheblend {cacheblend_cli.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None) -> int:
    """Run the command (default: the process's arguments) and return the exit code of the contract."""
    try:
        code = app(arguments, prog_name="cacheblend", standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # the parser has caught the Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()  # a reader of a pipe who has left is noticed before the end
    except BaseException as error:
        code = _failed(error)
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point."""
    open_closed()
    have_a_home()
    spin_shortly()
    sys.exit(run())


def open_closed() -> None:
    """Of the three streams those that whoever started this has closed are empty: else the next file that is opened, which may
    be the store's, would have the number that messages go to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def have_a_home() -> None:
    """An account that has none, as in a container that runs as a number, has one where nothing is and nothing can be made."""
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = "/nonexistent"


def spin_shortly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set a short spin, where the user has set none of the variables. libgomp reads it when it is loaded, with torch."""
    if not any(name in environment for name in VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT


def _failed(error: BaseException) -> int:
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        if isinstance(error.__context__, BrokenPipeError):  # the parser ends so when the reader of a pipe has left
            error = error.__context__
        else:
            return error.code if isinstance(error.code, int) else 1
    if isinstance(error, typer.Abort):
        error = KeyboardInterrupt()
    from cacheblend_cli.cli.exits import report

    return report(error, Output())
