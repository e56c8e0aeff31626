"""The `cacheblend` command. Importing this module imports neither torch nor transformers nor numpy."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import cacheblend_cli
from cacheblend_cli.cli import ask, chunks, config, demo, doctor, precompute, search
from cacheblend_cli.cli.output import Output

app = typer.Typer(
    name="cacheblend",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Answer questions over documents whose KV cache is computed once, reused in any order, and repaired.",
)
app.command("precompute")(precompute.precompute)
app.command("ask")(ask.ask)
app.command("search")(search.search)
app.add_typer(chunks.app, name="chunks")
app.command("demo")(demo.demo)
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


def main() -> None:
    """Run the command and exit with the code of the contract."""
    try:
        code = app(standalone_mode=False)
    except BaseException as error:
        code = _failed(error)
    sys.exit(code if isinstance(code, int) else 0)


def _failed(error: BaseException) -> int:
    import click

    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.exceptions.Abort):
        error = KeyboardInterrupt()
    if isinstance(error, click.ClickException):
        error.show()
        return 2
    from cacheblend_cli.cli.exits import report

    return report(error, Output())
