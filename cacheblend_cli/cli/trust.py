"""cacheblend trust: accept the settings and the store that a project brings."""

from __future__ import annotations

from pathlib import Path

from cacheblend_store import ChunkStore
from typer import Argument, Option

from cacheblend_cli import trust as record
from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.settings.identity import risky_settings
from cacheblend_cli.settings.sources import config_files, read_settings


def trust(
    folder: Path = Argument(Path(), help="Folder of the project.", metavar="[DIR]", show_default=False),
    remove: bool = Option(False, "--remove", help="Stop trusting it."),
    json: options.Json = False,
) -> None:
    """Accept the settings and the store that a project brings.

    Only if you trust them, a project's cacheblend.toml may set the model, the store or a tier, and its .cacheblend may
    hold the store: they may have come with a checkout, and decide where your data goes. Shows what is accepted. A
    changed file must be trusted again.
    """
    output = Output(json=json)
    if not folder.is_dir():
        raise NotFoundError(f"no such folder: {folder}", "check the path")
    file, own = next(iter(config_files(folder)[1:]), None), folder / record.PROJECT_FOLDER
    if file is None and not record.has_store(own):
        raise NotFoundError(
            f"{folder.resolve()} has neither a cacheblend.toml nor a .cacheblend/store", "name another one"
        )
    try:
        found = _settings(file, remove=remove) if file else {}
        store = own.resolve() / record.STORE if record.has_store(own) else None
        if store and remove:
            record.unstamp(own)
        elif store:
            _accept(own)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}", "check its owner and permissions") from error
    output.json({"file": file and str(file), "settings": found, "store": store and str(store), "trusted": not remove})
    verb = "no longer trusted" if remove else "trusted"
    if file:
        output.line(f"{verb}: {file}")
        for name, value in found.items():
            output.line(f"  {name} = {value!r}")
    if store:
        output.line(f"{verb}: {store}")


def _accept(folder: Path) -> None:
    """Accept the store of a `.cacheblend`. Its new identity is not known where it came from. Raises OSError."""
    if record.has_link(folder):
        raise UsageError(
            f"{folder / record.STORE} is a symbolic link", "name its target: cacheblend config set store PATH"
        )
    with ChunkStore.open(folder / record.STORE, mode="write", create=False) as store:
        store.set_identity()
        record.stamp(folder, store.identity)


def _settings(file: Path, *, remove: bool) -> dict[str, object]:
    """Trust a settings file or, with remove, trust it no longer. Return the settings that need trust."""
    content, values = read_settings(file)
    if remove:
        record.distrust(file)
    else:
        record.trust(file, content)
    return {name: values[name] for name in risky_settings(values, file.parent)}
