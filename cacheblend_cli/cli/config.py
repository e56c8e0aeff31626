"""cacheblend config: what the settings are, where they come from, and how they are kept in a file."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.settings import resolve

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show and change the settings.")


User = Annotated[bool, typer.Option("--user", help="The user's file, for every folder, and not the project's.")]


@app.command("show")
def show(
    store: Annotated[str | None, typer.Option(help="As any command would take it.")] = None,
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


@app.command("init")
def init(
    user: User = False,
    force: Annotated[bool, typer.Option("--force", help="Write a file that is there anew.")] = False,
) -> None:
    """Write a cacheblend.toml here, with every setting, its default and what it does, commented out."""
    from cacheblend_cli.cli import config_file

    file = config_file.file_here(user=user, new=True)
    config_file.init(file, force=force)
    Output().note(f"wrote {file}")


@app.command("set")
def set_(
    key: Annotated[str, typer.Argument(help="A setting, as config show names it.")],
    values: Annotated[list[str], typer.Argument(help="Its value; of template-var, several.", metavar="VALUE...")],
    user: User = False,
) -> None:
    """Set a setting in the project's cacheblend.toml, or, where there is none, in one made here."""
    from cacheblend_cli.cli import config_file

    file = config_file.file_here(user=user)
    name, value = config_file.put(file, key, values)
    Output().note(f"{name} is {value!r} in {file}")


@app.command("unset")
def unset(key: Annotated[str, typer.Argument(help="A setting, as config show names it.")], user: User = False) -> None:
    """Take a setting out of the project's cacheblend.toml."""
    from cacheblend_cli.cli import config_file

    file = config_file.file_here(user=user)
    Output().note(f"{config_file.take(file, key)} is no longer set in {file}")
