"""The `cacheblend` command. Importing this module imports neither torch nor transformers nor numpy."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import cacheblend_cli
from cacheblend_cli.cli import (
    archive,
    ask,
    bench,
    chunks,
    config,
    demo,
    doctor,
    eval,
    models,
    precompute,
    search,
    serve,
    upkeep,
)
from cacheblend_cli.cli.help import Command
from cacheblend_cli.cli.output import Output, flush
from cacheblend_cli.errors import ExitCode

app = typer.Typer(
    name="cacheblend",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Answer questions over documents whose KV cache is computed once, reused in any order, and repaired.",
)
app.command("precompute", cls=Command)(precompute.precompute)
app.command("ask", cls=Command)(ask.ask)
app.command("search", cls=Command)(search.search)
app.command("serve", cls=Command)(serve.serve)
for command in (upkeep.stats, upkeep.verify, upkeep.prune, upkeep.compact):
    chunks.app.command(command.__name__)(command)
chunks.app.command("export")(archive.export)
chunks.app.command("import")(archive.import_)
app.add_typer(chunks.app, name="chunks")
app.add_typer(models.app, name="models")
app.command("bench", cls=Command)(bench.bench)
app.command("eval", cls=Command)(eval.evaluate)
app.command("demo", cls=Command)(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(config.app, name="config")


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
        flush()
    except BaseException as error:
        code = _failed(error)
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point."""
    sys.exit(run())


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
