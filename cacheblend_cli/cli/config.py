"""cacheblend config: what the settings are and where they come from."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.settings import resolve

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show the settings.")


@app.command("show")
def show(
    store: Annotated[str | None, typer.Option(help="As any command would take it.", show_default=False)] = None,
    json: options.Json = False,
) -> None:
    """Show every setting, its value and where that came from: flag, environment, file or default."""
    output, resolved = Output(), resolve({"store": store})
    values = vars(resolved.settings) | {"store": str(resolved.settings.store_path)}
    if json:
        output.json({name: {"value": value, "from": resolved.origin[name]} for name, value in values.items()})
    else:
        output.table(
            ("setting", "value", "from"), [(n, v if v != "" else '""', resolved.origin[n]) for n, v in values.items()]
        )
