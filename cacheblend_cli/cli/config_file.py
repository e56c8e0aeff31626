"""The file that config init and set write: a project's cacheblend.toml, or the user's config.toml."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.settings import FILE, PATHS, Settings, config_files, parse_setting

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


def file_here(*, user: bool, new: bool = False) -> Path:
    """The user's file; else the project's, and where there is none, or a `new` one is wanted, the one to make here."""
    files = config_files()
    if user:
        return files[0]
    return Path.cwd() / FILE if new or len(files) < 2 else files[-1]


def init(file: Path, *, force: bool) -> None:
    """Write a file with every setting at its default, commented out. Raises UsageError where there is one."""
    if file.exists() and not force:
        raise UsageError(
            f"{file} is there already", "change it: cacheblend config set KEY VALUE; --force writes it anew"
        )
    _write(file, "\n".join(_template()))


def put(file: Path, key: str, texts: Sequence[str]) -> tuple[str, Any]:
    """Set a value, and leave the rest of the file as it is. Raises UsageError for what is no setting or no value of it."""
    from tomlkit import dumps

    name, value = parse_setting(key, texts)
    if name in PATHS:
        value = _from(file, value)
    document = _read(file)
    for known in [k for k in document if k.replace("-", "_") == name]:
        del document[known]
    document[name] = value
    _write(file, dumps(document))
    return name, value


def take(file: Path, key: str) -> str:
    """Remove a setting. Raises NotFoundError where the file has none of that name."""
    from tomlkit import dumps

    document, name = _read(file), key.replace("-", "_")
    found = [known for known in document if known.replace("-", "_") == name]
    if not found:
        raise NotFoundError(f"{file} does not set {key}", "see: cacheblend config show")
    for known in found:
        del document[known]
    _write(file, dumps(document))
    return name


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


def _read(file: Path) -> TOMLDocument:
    from tomlkit import document, parse
    from tomlkit.exceptions import TOMLKitError

    if not file.exists():
        return document()
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}", "mend or remove it") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "check its permissions") from error


def _write(file: Path, text: str) -> None:
    """In the place of the old one, whole or not at all."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{file} cannot be written: {error.strerror}", "check its permissions") from error
