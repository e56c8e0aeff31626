"""cacheblend config: show settings and edit the project's cacheblend.toml or the user's config.toml; comments stay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cacheblend_cli import trust
from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.flags import PANELS
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.setting_checks import bad_settings, blamed
from cacheblend_cli.errors import ExitCode, NotFoundError, UsageError
from cacheblend_cli.settings import Resolved, Settings, resolve
from cacheblend_cli.settings.identity import risky_settings
from cacheblend_cli.settings.sources import FILE, PATHS, config_files, parse_setting, project_root, read_settings
from cacheblend_cli.text_files import decode_text

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show and change settings.")


Key = Annotated[str, Argument(help="Name of a setting (see config show).", autocompletion=completion.settings)]
User = Annotated[bool, Option("--user", help="Edit the user's file, which applies in all folders.")]
Project = Annotated[
    bool, Option("--project", help="Edit the project's file; outside a project, create it in this folder.")
]


@app.command("show")
def show(
    store: str | None = Option(None, help="Directory of the store, as for other commands."),
    every: bool = Option(False, "--all", help="Show every setting, by topic."),
    json: options.Json = False,
) -> None:
    """Show settings and their origins.

    Shows common settings, and settings that are set. The origin of a value is a flag, an environment variable, a file
    or the default. --json shows every setting. Bad values are reported at the end (exit code 2).
    """
    output, resolved = Output(json=json), resolve({"store": store}, lenient=True)
    (_show_json if json else partial(_show_tables, every=every))(resolved, output)
    blamed_ones = (blamed(error, name, resolved.origin[name]) for name, error in bad_settings(resolved))
    if problems := [*resolved.problems, *blamed_ones]:
        for problem in problems:
            output.error(problem.message, problem.hint)
        raise typer.Exit(ExitCode.USAGE)


def _show_json(resolved: Resolved, output: Output) -> None:
    records = {name: {"value": value, "from": resolved.origin[name]} for name, value in _values(resolved).items()}
    output.json(records | {name: {**records[name], "ignored": place} for name, place in resolved.ignored.items()})


def _show_tables(resolved: Resolved, output: Output, *, every: bool) -> None:
    values = _values(resolved)
    origin = {**resolved.origin, **{n: f"{resolved.origin[n]} (ignored: {p})" for n, p in resolved.ignored.items()}}
    shown = {n for n in values if every or n in options.COMMON or origin[n] != "default"}
    for number, (title, names) in enumerate(_topics()):
        rows = [(n, "not set" if values[n] in ("", None, ()) else values[n], origin[n]) for n in names if n in shown]
        if rows:
            if number:
                output.line("")
            output.table((title, "value", "from"), rows)
    if resolved.ignored:
        output.warn(resolved.ignored_note)
    if left := len(values) - len(shown):
        output.note(f"{left} more settings have defaults; see: cacheblend config show --all")


def _values(resolved: Resolved) -> dict[str, Any]:
    return vars(resolved.settings) | {"store": str(resolved.settings.store_path)}


@app.command("init")
def init(user: User = False, force: bool = Option(False, "--force", help="Overwrite an existing file.")) -> None:
    """Write a cacheblend.toml with every setting.

    Each is commented out, with its default and its description.
    """
    file = settings_file(user=True) if user else Path.cwd() / FILE
    if file.exists() and not force:
        raise UsageError(
            f"{file} already exists", "change a setting: cacheblend config set KEY VALUE; --force overwrites the file"
        )
    write_text(file, "\n".join(_template()))
    Output().note(f"wrote {file}")


@app.command("set")
def set_(
    key: Key,
    values: list[str] = Argument(
        help="Value; template-var takes several.", metavar="VALUE...", autocompletion=completion.values
    ),
    user: User = False,
    project: Project = False,
) -> None:
    """Set a setting in the project's cacheblend.toml.

    Outside a project, set it in the user's file, which applies in all folders. A project is the nearest folder upwards
    with a cacheblend.toml or .git. The file is created if there is none.
    """
    file = settings_file(user=user, project=project)
    name, value = parse_setting(key, values)
    before = {error.message for _, error in bad_settings(resolve({}, lenient=True))}
    for bad, error in bad_settings(resolve({name: value}, lenient=True)):
        if bad == name or error.message not in before:
            raise blamed(error, name, "")
    if name in PATHS:
        value = _from(file, value)
    write_setting(file, name, value)
    Output().note(f"{name} is {value!r} in {file}")


@app.command("unset")
def unset(key: Key, user: User = False, project: Project = False) -> None:
    """Remove a setting from the project's cacheblend.toml.

    Outside a project, remove it from the user's file.
    """
    from tomlkit import dumps

    file, name = settings_file(user=user, project=project), key.replace("-", "_")
    document = read_document(file)
    if not remove_setting(document, name):
        users = config_files()[0]
        by_user = file != users and users.is_file() and name in read_settings(users)[1]
        raise NotFoundError(
            f"{file} does not set {key}", f"{users} does: --user" if by_user else "see: cacheblend config show"
        )
    write_text(file, dumps(document))
    Output().note(f"{name} is no longer set in {file}")


def _template() -> Iterator[str]:
    from tomlkit import item

    yield "# Settings of cacheblend for this folder and its subfolders; flags and CACHEBLEND_* variables override them."
    yield "# Uncomment a line to set it. Paths are relative to this file."
    known = {field.name: field for field in fields(Settings)}
    for title, names in _topics():
        yield from ("", f"# === {title} ===")
        for field in (known[name] for name in names):
            yield ""
            if help := field.metadata.get("help"):
                yield f"# {help}"
            default = "" if field.default is None else field.default
            yield f"# {field.name} = {item(list(default) if isinstance(default, tuple) else default).as_string()}"
    yield ""


def _topics() -> list[tuple[str, Sequence[str]]]:
    """Return (title, settings) by topic: common ones first, research last."""
    panels = [(panel, [name for name, its in options.PANEL_OF.items() if its == panel]) for panel in PANELS]
    return [("Common settings", options.COMMON), *panels]


def _from(file: Path, value: str) -> str:
    """Return an existing path relative to the file; other values as they are."""
    path = Path(value).expanduser()
    if path.is_absolute() or not path.exists() or Path.cwd() == file.parent:
        return value
    return os.path.relpath(path, file.parent)


def settings_file(*, user: bool = False, project: bool = False) -> Path:
    """Return the path of the project's file, existing or not; outside a project or with `user`, the user's file.
    project: outside a project, return one in the working directory."""
    if user and project:
        raise UsageError("--user and --project were given together", "give one of them")
    root = project_root()
    if user or not (root or project):
        return config_files()[0]
    return (root or Path.cwd()) / FILE


def write_setting(file: Path, name: str, value: Any) -> None:
    """Set a setting in the file; comments and other settings stay. Raises UsageError."""
    from tomlkit import dumps

    document = read_document(file)
    remove_setting(document, name)
    document[name] = value
    write_text(file, dumps(document))


def remove_setting(document: TOMLDocument, name: str) -> bool:
    """Remove a setting, whether written with - or _. Returns whether it was there."""
    found = [known for known in document if known.replace("-", "_") == name]
    for known in found:
        del document[known]
    return bool(found)


def read_document(file: Path) -> TOMLDocument:
    """Parse the file; an empty document if there is none. Raises UsageError if it is not TOML or unreadable."""
    from tomlkit import document, parse
    from tomlkit.exceptions import TOMLKitError

    if not file.exists():
        return document()
    content, _ = read_settings(file)  # within limits
    try:
        return parse(decode_text(content, str(file)))
    except (TOMLKitError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}", "fix or remove it") from error


def write_text(file: Path, text: str) -> None:
    """Replace the file atomically. Trust a project's file if none of its settings were ignored: the user wrote the
    rest.

    Raises UsageError if it cannot be written.
    """
    is_own = file.name == FILE
    if is_own and file.exists():
        content, values = read_settings(file)
        is_own = trust.is_trusted(file, content) or not risky_settings(values, file.parent)
    beside = file.with_name(f".{file.name}.{os.urandom(4).hex()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("x", encoding="utf-8") as stream:  # not through a link that a checkout holds
            stream.write(text)
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{file} cannot be written: {error.strerror}", "check its permissions") from error
    if is_own:
        try:
            trust.trust(file, text.encode())
        except OSError as error:
            raise UsageError(
                f"{file} is written, but cannot be recorded as trusted: {error.strerror}",
                "set the value in the environment or in the user's file (--user)",
            ) from error
