"""cacheblend config: what the settings are, where they come from, and how they are kept in a project's cacheblend.toml or
the user's config.toml."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.config_file import read_document, remove_setting, settings_file, write_text
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.settings import PATHS, Settings, parse_setting, resolve

if TYPE_CHECKING:
    pass

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show and change the settings.")


Key = Annotated[str, typer.Argument(help="A setting, as config show names it.")]
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
    file = settings_file(user=user, new=True)
    if file.exists() and not force:
        raise UsageError(
            f"{file} is there already", "change it: cacheblend config set KEY VALUE; --force writes it anew"
        )
    write_text(file, "\n".join(_template()))
    Output().note(f"wrote {file}")


@app.command("set")
def set_(
    key: Key,
    values: Annotated[list[str], typer.Argument(help="Its value; of template-var, several.", metavar="VALUE...")],
    user: User = False,
) -> None:
    """Set a setting in the project's cacheblend.toml, or, where there is none, in one made here."""
    from tomlkit import dumps

    file = settings_file(user=user)
    name, value = parse_setting(key, values)
    if name in PATHS:
        value = _from(file, value)
    document = read_document(file)
    remove_setting(document, name)
    document[name] = value
    write_text(file, dumps(document))
    Output().note(f"{name} is {value!r} in {file}")


@app.command("unset")
def unset(key: Key, user: User = False) -> None:
    """Take a setting out of the project's cacheblend.toml."""
    from tomlkit import dumps

    file, name = settings_file(user=user), key.replace("-", "_")
    document = read_document(file)
    if not remove_setting(document, name):
        raise NotFoundError(f"{file} does not set {key}", "see: cacheblend config show")
    write_text(file, dumps(document))
    Output().note(f"{name} is no longer set in {file}")


def _template() -> Iterator[str]:
    yield "# Settings of cacheblend for this folder and those below it; flags and CACHEBLEND_* variables are stronger."
    yield "# Remove the # before a line to set it. A path is meant from this file."
    for field in fields(Settings):
        yield ""
        if help := field.metadata.get("help"):
            yield f"# {help}"
        yield f"# {field.name} = {_toml(field.default)}"
    yield ""


def _toml(value: Any) -> str:
    """A default as TOML; what has none is empty text."""
    from tomlkit import item

    return item("" if value is None else list(value) if isinstance(value, tuple) else value).as_string()


def _from(file: Path, value: str) -> str:
    """A path that was typed here, as it is meant from the file. A name that is no path here stays."""
    path = Path(value).expanduser()
    if path.is_absolute() or not path.exists() or Path.cwd() == file.parent:
        return value
    return os.path.relpath(path, file.parent)
