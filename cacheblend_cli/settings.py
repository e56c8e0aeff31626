"""Settings: flag > CACHEBLEND_* > project cacheblend.toml > user config > default. An unknown key is an error."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from platformdirs import user_config_path, user_data_path

from cacheblend_cli.errors import UsageError

FILE = "cacheblend.toml"
_ENV = "CACHEBLEND_"


@dataclass(frozen=True)
class Settings:
    """Every setting with its default. model "" is the bundled demo model; seed and threads None: not fixed; ratio: a
    number or "auto", which is ratio_floor at least.

    max_size "": the quota the store has. force_store: accept a store on a network filesystem, or of another owner."""

    model: str = ""
    store: str = ""
    chunk_tokens: int = 512
    context: str = "document"
    window: int = 2048
    neighbours: int = 3
    kv_dtype: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    mode: str = "blend"
    ratio: float | str = 0.15
    ratio_floor: float = 0.15
    selector: str = "query"
    deviation: str = "k"
    check_layer: int = 1
    block: int = 1
    nucleus: float = 0.0
    gradual: str = ""
    probe_layers: str = ""
    draft_tokens: int = 8
    mean_shift: bool = False
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 5
    sample_top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    lock_timeout: float = 30.0
    force_store: bool = False
    max_size: str = ""
    salt: str = ""
    threads: int | None = None
    block_size: int = 64
    gpu_memory_utilization: float = 0.9
    eager: bool = False
    kv_pool_dtype: str = "auto"

    @property
    def store_path(self) -> Path:
        """The named store; else ./.cacheblend/store when .cacheblend is there; else the user's data directory."""
        if self.store:
            return Path(self.store).expanduser()
        if Path(".cacheblend").is_dir():
            return Path(".cacheblend/store")
        return user_data_path("cacheblend") / "store"


@dataclass(frozen=True)
class Resolved:
    """Settings and where each value came from: "default", a file, an environment variable or "flag"."""

    settings: Settings
    origin: Mapping[str, str]


def _kind(hint: Any) -> type:
    """The type a setting's value has when it is given."""
    kind: type = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    return kind


_FIELDS = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
_LEAST = {"top_k": 1, "threads": 1, "lock_timeout": 0, "seed": -(2**63)}  # what no other place checks
_MOST = {"threads": 4096}  # other whole numbers: what 64 bits hold
_WORDS = {"ratio": "auto"}  # what can stand where a number is wanted
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_PATHS = ("store", "model")  # in a file they are relative to it


def resolve(flags: Mapping[str, Any]) -> Resolved:
    """Put the layers together; a flag of None was not given. Raises UsageError naming the place of a bad value."""
    values: dict[str, Any] = {}
    origin = dict.fromkeys(_FIELDS, "default")
    for path in config_files():
        if path.is_file():
            _merge(values, origin, _read(path), str(path), path.parent)
    for variable, text in os.environ.items():
        if variable.startswith(_ENV) and text:  # an empty variable is an unset one
            _merge(values, origin, {variable.removeprefix(_ENV).lower(): _Text(text)}, variable)
    _merge(values, origin, {k: v for k, v in flags.items() if v is not None}, "flag")
    return Resolved(Settings(**values), origin)


def config_files() -> list[Path]:
    """The user's file and the project's, the latter stronger: the nearest cacheblend.toml from the working directory up
    to the root of its repository or the home directory."""
    files = [user_config_path("cacheblend") / "config.toml"]
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return [*files, folder / FILE]
        if (folder / ".git").exists() or folder == Path.home():
            break
    return files


class _Text(str):
    """A value that can only be text where it was written: "5" is a number then."""


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "mend or remove it") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error


def _merge(
    values: dict[str, Any], origin: dict[str, str], layer: Mapping[str, Any], place: str, folder: Path | None = None
) -> None:
    for key, value in layer.items():
        name = key.replace("-", "_")
        if name not in _FIELDS:
            raise UsageError(f"unknown setting {key!r} in {place}", f"known: {', '.join(_FIELDS)}")
        values[name] = _convert(name, value, place)
        if folder is not None and name in _PATHS:
            values[name] = _beside(folder, name, values[name])
        origin[name] = place


def _convert(name: str, value: Any, place: str) -> Any:
    kind = _FIELDS[name]
    shown = f"--{name.replace('_', '-')}" if place == "flag" else f"{name} in {place}"
    if name in _WORDS:
        if value == _WORDS[name]:
            return str(value)
        if place == "flag" and isinstance(value, str):  # such a flag takes words, so it comes as text
            value = _Text(value)
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int)) or isinstance(value, _Text)
    try:
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError
        converted = _BOOLS[value.lower()] if kind is bool and isinstance(value, _Text) else kind(value)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError
    except (ValueError, KeyError):
        hint = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
        hint += f" or {_WORDS[name]}" if name in _WORDS else ""
        raise UsageError(f"{shown} is {value!r}, and {hint} is wanted", "see: cacheblend config show") from None
    if kind is int and converted > (most := _MOST.get(name, 2**63 - 1)):
        raise UsageError(f"{shown} is {value!r}, and {most} is the most", "see: cacheblend config show")
    if name in _LEAST and converted < _LEAST[name]:
        raise UsageError(f"{shown} is {value!r}, and {_LEAST[name]} is the least", "see: cacheblend config show")
    return converted


def _beside(folder: Path, name: str, value: str) -> str:
    """A path in a file is meant from that file. A model that could be a hub id is one unless the directory is there."""
    path = Path(value).expanduser()
    if name == "model" and not (value.startswith(("./", "../", "~")) or (folder / path).is_dir()):
        return value
    return str(folder / path) if value else value
