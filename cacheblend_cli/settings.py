"""Settings: flag > CACHEBLEND_* > project cacheblend.toml > user config > default. An unknown key is an error."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from platformdirs import user_config_path, user_data_path

from cacheblend_cli.errors import UsageError

FILE = "cacheblend.toml"
_ENV = "CACHEBLEND_"


@dataclass(frozen=True)
class Settings:
    """Every setting with its default. model "" is the bundled demo model."""

    model: str = ""
    store: str = ""
    chunk_tokens: int = 512
    context: str = "sink"
    kv_dtype: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    mode: str = "blend"
    ratio: float = 0.15
    selector: str = "hkvd"
    deviation: str = "v"
    check_layer: int = 1
    block: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 5
    sample_top_k: int = 0
    min_p: float = 0.0
    seed: int = -1
    lock_timeout: float = 30.0
    salt: str = ""
    threads: int = 0

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


_FIELDS: dict[str, type[str] | type[int] | type[float]] = {f.name: type(f.default) for f in fields(Settings)}  # type: ignore[misc]


def resolve(flags: Mapping[str, Any]) -> Resolved:
    """Put the layers together; a flag of None was not given. Raises UsageError naming the place of a bad value."""
    values: dict[str, Any] = {}
    origin = dict.fromkeys(_FIELDS, "default")
    for path in (user_config_path("cacheblend") / "config.toml", project_file()):
        if path is not None and path.is_file():
            _merge(values, origin, _read(path), str(path))
    env = {k.removeprefix(_ENV).lower(): v for k, v in os.environ.items() if k.startswith(_ENV)}
    for name, text in env.items():
        _merge(values, origin, {name: text}, f"{_ENV}{name.upper()}")
    _merge(values, origin, {k: v for k, v in flags.items() if v is not None}, "flag")
    return Resolved(Settings(**values), origin)


def project_file() -> Path | None:
    """The nearest cacheblend.toml, from the working directory up to the home directory or the root of a repository."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return folder / FILE
        if (folder / ".git").exists() or folder == Path.home():
            return None
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "mend or remove it") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error


def _merge(values: dict[str, Any], origin: dict[str, str], layer: Mapping[str, Any], place: str) -> None:
    for key, value in layer.items():
        name = key.replace("-", "_")
        if name not in _FIELDS:
            raise UsageError(f"unknown setting {key!r} in {place}", f"known: {', '.join(_FIELDS)}")
        values[name] = _convert(name, value, place)
        origin[name] = place


def _convert(name: str, value: Any, place: str) -> Any:
    kind = _FIELDS[name]
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float)) or isinstance(value, (list, dict)):
            raise ValueError
        return kind(value)
    except ValueError:
        raise UsageError(f"{name} in {place} is {value!r}, and a {kind.__name__} is wanted", "mend the value") from None
