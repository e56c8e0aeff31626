"""Sources of settings: flag > CACHEBLEND_* > project cacheblend.toml > user config > default. An unknown key is an
error."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cacheblend_store.private_files import read_regular
from platformdirs import user_config_path

from cacheblend_cli import trust
from cacheblend_cli.errors import NotFoundError, UsageError, did_you_mean
from cacheblend_cli.settings.fields import API_KEY_VARIABLE, REMOVED, Settings, check_kv_dtype
from cacheblend_cli.settings.identity import risky_settings
from cacheblend_cli.text_files import check_text, decode_text, reading

FILE = "cacheblend.toml"
_ENV = "CACHEBLEND_"
_MOST_BYTES = 64 << 10  # of a settings file
_MOST_DOTS = 512  # in a line: the time for a dotted key is quadratic in its parts


@dataclass(frozen=True)
class Resolved:
    """Settings, and the origin of each value: "default", a file, an environment variable or "flag".

    ignored: settings of a project that is not trusted -> file or folder that sets them. See `trust`.
    problems: errors of files and values that were left out.
    """

    settings: Settings
    origin: Mapping[str, str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[UsageError | NotFoundError] = ()

    @property
    def ignored_note(self) -> str:
        """Say what is ignored and how to trust it; "" if nothing is."""
        places, names = list(dict.fromkeys(self.ignored.values())), ", ".join(self.ignored)
        if not places:
            return ""
        subject = f"{' and '.join(places)} {'is' if len(places) == 1 else 'are'} not trusted"
        return f"{subject}: ignored {names}; to accept: cacheblend trust"


def _kind(hint: Any) -> type:
    """Return the type of a setting's value, ignoring None."""
    kind: type = get_args(hint)[0] if isinstance(hint, UnionType) else get_origin(hint) or hint
    return kind


_FIELDS = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
DEFAULTS = Resolved(Settings(), dict.fromkeys(_FIELDS, "default"))
_METADATA = {field.name: field.metadata for field in fields(Settings)}
_WORDS = {"ratio": ("auto", "model"), "speculate": ("auto", "off")}  # words allowed in place of a number
_EXAMPLES = {
    "ratio": 0.15, "speculate": 4, "top_k": 5, "seed": 7, "threads": 4, "model": "handbook", "template_var": "enable_thinking=true",
    "allow_origin": "https://chat.example",
}  # fmt: skip
"""Values for hints, where the default is none."""
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
PATHS = ("store", "model", "lora", "prompt", "embeddings", "tier_key_file")
"""Settings with paths, which are relative to the file that sets them."""


def resolve(flags: Mapping[str, Any], *, lenient: bool = False) -> Resolved:
    """Merge all sources. A flag of None or [] counts as not given. Raises UsageError with the origin of a bad value;
    lenient: leaves it out."""
    values: dict[str, Any] = {}
    origin, ignored = dict(DEFAULTS.origin), dict[str, str]()
    problems = list[UsageError | NotFoundError]()
    users, *projects = config_files()
    for path in filter(Path.is_file, (users, *projects)):
        try:
            found, ignored = _accepted(path, is_users=path == users)
        except (UsageError, NotFoundError) as error:
            problems.append(error)
            continue
        problems += _merge(values, origin, found, str(path), path.parent)
    for variable, text in _variables():
        problems += _merge(values, origin, {variable.removeprefix(_ENV).lower(): _Text(text)}, variable)
    problems += _merge(values, origin, {k: v for k, v in flags.items() if v is not None and v != []}, "flag")
    if problems and not lenient:
        raise problems[0]
    if not values.get("store") and trust.project_folder() is None and os.path.lexists(trust.PROJECT_FOLDER):
        ignored["store"] = os.path.abspath(trust.PROJECT_FOLDER)
    chosen = {name for name, place in origin.items() if place == "flag" or place.startswith(_ENV)}
    unset = {name: p for name, p in ignored.items() if name not in chosen}
    return Resolved(Settings(**values), origin, unset, problems)


def _accepted(path: Path, *, is_users: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's settings, and those ignored because the project is not trusted, with the file."""
    content, found = read_settings(path)
    if is_users or trust.is_trusted(path, content):
        return found, {}
    risky = risky_settings(found, path.parent)
    return {k: v for k, v in found.items() if k not in risky}, dict.fromkeys(risky, str(path))


def _variables() -> list[tuple[str, str]]:
    """Return the environment's settings. An empty variable counts as unset."""
    return [(v, text) for v, text in os.environ.items() if text and v.startswith(_ENV) and v != API_KEY_VARIABLE]


def parse_setting(key: str, texts: Sequence[str]) -> tuple[str, Any]:
    """Return the field name and the converted value of `config set KEY VALUE...`. Raises UsageError."""
    name = _name(key)
    if name not in _FIELDS:
        raise unknown_setting(key, "")
    if _FIELDS[name] is tuple:
        return name, list(texts)
    if len(texts) != 1:
        raise UsageError(f"{key} takes one value, not {len(texts)}", "put text with spaces in quotes")
    return name, _convert(name, _Text(texts[0]), "")


def config_files(folder: Path = Path()) -> list[Path]:
    """Return the user's file and, if it exists, the project's file, which takes precedence.

    The project's file is the nearest cacheblend.toml from the folder up to the repository root or home directory.
    """
    files, root = [user_config_path("cacheblend") / "config.toml"], project_root(folder)
    return [*files, root / FILE] if root is not None and (root / FILE).is_file() else files


def project_root(folder: Path = Path()) -> Path | None:
    """Return the nearest folder with a cacheblend.toml or .git, up to the home directory; None outside a project."""
    try:
        here = Path(os.path.abspath(folder))
    except FileNotFoundError:
        raise NotFoundError("the current directory no longer exists", "change to another one") from None
    for folder in (here, *here.parents):
        if (folder / FILE).is_file() or (folder / ".git").exists():
            return folder
        if folder == Path.home():
            break
    return None


def read_settings(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return a settings file's content, as read and by name. Raises UsageError, NotFoundError."""
    import tomllib

    with reading(path):
        content = read_regular(path, _MOST_BYTES)
    if any(line.count(b".") > _MOST_DOTS for line in content.split(b"\n")):
        raise UsageError(f"{path} has a line with more than {_MOST_DOTS} dots", "fix or remove it")
    try:
        values = tomllib.loads(decode_text(content, str(path)))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "fix or remove it") from error
    return content, {_name(key): value for key, value in values.items()}


def _name(key: str) -> str:
    return key.replace("-", "_")


class _Text(str):
    """A value from the environment or command line, to convert from text."""


def _merge(
    values: dict[str, Any], origin: dict[str, str], layer: Mapping[str, Any], place: str, folder: Path | None = None
) -> list[UsageError]:
    """Add the settings of one place. Return the errors of those that are left out."""
    problems = list[UsageError]()
    for key, value in layer.items():
        name = _name(key)
        try:
            converted = _known(name, key, value, place)
        except UsageError as error:
            problems.append(error)
            continue
        if folder is not None and name in PATHS:
            converted = _beside(folder, name, converted)
        values[name], origin[name] = converted, place
    return problems


def _known(name: str, key: str, value: Any, place: str) -> Any:
    """Return the value of a setting in its type. Raises UsageError, also for an unknown one."""
    if name in _FIELDS:
        return _convert(name, value, place)
    if isinstance(value, dict):
        hint = f"settings have no sections: remove the line [{key}]"
        raise UsageError(f"unknown setting {key!r} in {place}", hint)
    raise unknown_setting(key, place)


def unknown_setting(key: str, place: str) -> UsageError:
    """Return the error for a setting that does not exist, or not any more. place: file or variable, "" for none."""
    name, where = _name(key), f" in {place}" if place else ""
    if name in REMOVED:
        undo = f"unset {place}" if place.startswith(_ENV) else "remove the line" if place else ""
        return UsageError(f"the setting {key!r}{where} was removed", "; ".join(filter(None, (REMOVED[name], undo))))
    hint = did_you_mean(name, _FIELDS, "cacheblend config show --all", most=3)
    return UsageError(f"unknown setting {key!r}{where}", hint)


def _convert(name: str, value: Any, place: str) -> Any:
    """Return the value in the setting's type. place: origin for messages: "flag", a file, a variable, or ""."""
    kind = _FIELDS[name]
    shown = f"--{name.replace('_', '-')}" if place == "flag" else f"{name} in {place}" if place else name
    if kind is tuple:
        return _texts(name, value, shown)
    if name in _WORDS:
        if value in _WORDS[name]:
            return str(value)
        if place == "flag" and isinstance(value, str):  # a flag that also takes words arrives as text
            value = _Text(value)
    try:
        converted = _typed(kind, value)
    except (ValueError, KeyError):
        expected = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
        expected += f", {' or '.join(_WORDS[name])}" if name in _WORDS else ""
        raise UsageError(f"{shown} is {value!r}, not {expected}", _share(value) or _example(name, place)) from None
    if isinstance(converted, str):
        _check_word(name, converted, place, shown)
    else:
        _check_bounds(name, converted, place, shown)
    return converted


def _typed(kind: type, value: Any) -> Any:
    """Return the value as a finite number, a bool or text. Raises ValueError, KeyError."""
    fits = isinstance(value, (kind, _Text)) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError
    converted = _BOOLS[value.lower()] if kind is bool and isinstance(value, _Text) else kind(value)
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ValueError
    return converted


def _check_word(name: str, value: str, place: str, shown: str) -> None:
    """Raises UsageError for text that is not UTF-8, an unknown name, or a tier with credentials."""
    if name not in PATHS:
        check_text(value, shown)
    if (choices := _METADATA[name].get("choices")) and value not in choices:
        named = f"{shown} {value!r}" if place in ("flag", "") else f"{name} {value!r} in {place}"
        if name == "kv_dtype":
            check_kv_dtype(value, named)
        raise UsageError(f"unknown {named}", f"known: {', '.join(choices)}")
    if name == "tier" and ("@" in value or "?" in value):  # do not print it: others may read the message
        raise UsageError(f"{shown} contains credentials", "name only a bucket and a prefix; credentials: environment")


def _check_bounds(name: str, value: float, place: str, shown: str) -> None:
    least, most = _METADATA[name].get("least"), _METADATA[name].get("most", math.inf)
    if value > most:
        raise UsageError(f"{shown} is {value!r}; the maximum is {most}", _example(name, place))
    if least is not None and value < least:
        raise UsageError(f"{shown} is {value!r}; the minimum is {least}", _example(name, place))


def _example(name: str, place: str) -> str:
    """Return a hint with a valid value, in the form of the place that has the wrong one."""
    kind, default = _FIELDS[name], _EXAMPLES.get(name, getattr(Settings(), name))
    value = str(default).lower() if kind is bool else f'"{default}"' if kind is str else f"{default:g}"
    if place == "flag":
        return f"for example --{name.replace('_', '-')} {value}"
    if place.startswith(_ENV):
        return f"for example {place}={value}"
    return f"for example {name} = {value}" if place else f"for example: cacheblend config set {name} {value}"


def _share(value: Any) -> str:
    """Return a hint for a percentage given as a number; "" for other values."""
    try:
        text = str(value).strip()
        return f"write {float(text.removesuffix('%')) / 100:g}" if text.endswith("%") else ""
    except ValueError:
        return ""


def _texts(name: str, value: Any, shown: str) -> tuple[str, ...]:
    """Return the values of a list, or of comma-separated text."""
    values = value.split(",") if isinstance(value, _Text) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise UsageError(f"{shown} is {value!r}, not a list of text", f'for example {name} = ["{_EXAMPLES[name]}"]')
    return tuple(v.strip() for v in values)


def _beside(folder: Path, name: str, value: str) -> str:
    """Resolve a path relative to its configuration file.

    A possible Hugging Face id stays, unless such a path exists.
    """
    path = Path(value).expanduser()
    if name in ("model", "embeddings") and not (
        value.startswith(("./", "../", "~"))
        or (folder / path).is_dir()
        or (path.suffix == ".gguf" and (":" not in value or (folder / path).is_file()))  # not the hub's ID:FILE.gguf
    ):
        return value
    return str(folder / path) if value else value
