"""Check settings before a command runs, by the code that uses them, and name where a bad value comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from cacheblend_store.errors import StoreError

from cacheblend_cli.cli.stores import OF_THE_STORE
from cacheblend_cli.cli.units import keep_alive_s, parse_size
from cacheblend_cli.errors import CacheBlendError, ModelNotFound, UsageError
from cacheblend_cli.settings import DEFAULTS, Resolved, Settings, grouped, of_settings
from cacheblend_cli.settings.sources import config_files
from cacheblend_cli.types.blend import BlendParams
from cacheblend_cli.types.sampling import sampling_of

_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
E = TypeVar("E", bound=CacheBlendError | StoreError)


def check_settings(resolved: Resolved) -> None:
    """Raise the error of the first setting whose value no command accepts, with the file or variable that sets it."""
    for name, error in bad_settings(resolved):
        raise blamed(error, name, resolved.origin[name])


def bad_settings(resolved: Resolved) -> Iterator[tuple[str, UsageError | StoreError]]:
    """Yield (setting, error) for up to one bad value of each check."""
    chosen = [name for name, origin in resolved.origin.items() if origin != "default"]
    for names, check in _CHECKS.items():
        own = [name for name in chosen if name in names]
        if own and (error := _error(check, resolved.settings)) is not None:
            without = ((name, _error(check, _without(name, resolved.settings))) for name in own)
            yield next((name for name, e in without if e is None or e.message != error.message), own[0]), error


def with_origin(error: E, resolved: Resolved) -> E:
    """Name the file or variable in an error about a flag that was not given, and how to undo it."""
    for name, origin in resolved.origin.items():
        is_model = name == "model" and isinstance(error, ModelNotFound) and error.name == resolved.settings.model
        if origin not in ("flag", "default", OF_THE_STORE) and (is_model or name in _named(error.message)):
            return blamed(error, name, origin)
    return error


def blamed(error: E, name: str, origin: str) -> E:
    """Name a setting and its origin in an error. "": on the command line of config set, without a flag."""
    if origin != "flag":
        error.message = _FLAG.sub(lambda m: m[1].replace("-", "_") if _named(m[0]) else m[0], error.message)
    if origin not in ("flag", ""):
        undo = f"unset {origin}"
        if origin in (files := [str(file) for file in config_files()]):
            undo = f"cacheblend config unset {name}{' --user' if origin == files[0] else ' --project'}"
        error.message, error.hint = f"{error.message} ({name} in {origin})", f"{error.hint}; to undo: {undo}"
    return error


def _named(message: str) -> set[str]:
    """Return the settings whose flags a message names."""
    return {flag.replace("-", "_") for flag in _FLAG.findall(message)} & vars(DEFAULTS.settings).keys()


def _without(name: str, settings: Settings) -> Settings:
    return replace(settings, **{name: getattr(DEFAULTS.settings, name)})  # type: ignore[arg-type]


def _error(check: Callable[[Settings], object], settings: Settings) -> UsageError | StoreError | None:
    try:
        check(settings)
    except (UsageError, StoreError) as error:
        return error
    return None


def _check_collecting(settings: Settings) -> None:
    from cacheblend_cli.collect.settings import CollectSettings

    of_settings(CollectSettings, settings)


def _check_engine(settings: Settings) -> None:
    from cacheblend_cli.engine.config import EngineConfig

    of_settings(EngineConfig, settings, prompt="")


def _check_languages(settings: Settings) -> None:
    from cacheblend_documents.ocr import OcrError, check_languages

    try:
        check_languages(settings.ocr_languages)
    except OcrError as error:
        raise UsageError(str(error), error.hint) from error


def _check_tier(settings: Settings) -> None:
    if settings.tier:
        from cacheblend_store.tier.object_stores import check_url

        from cacheblend_cli.kv.tier_location import is_extensions

        check_url(settings.tier, any_scheme=is_extensions(settings.tier))


def _check_origins(settings: Settings) -> None:
    from cacheblend_cli.server.auth import read_origins

    read_origins(settings.allow_origin)


_CHECKS: Mapping[tuple[str, ...], Callable[[Settings], object]] = {
    grouped("blend", "research"): BlendParams.of,
    grouped("sampling"): sampling_of,
    (*grouped("cutting"), "context", "kv_dtype"): _check_collecting,
    (*grouped("machine", "decoding", "memory"), "template_var"): _check_engine,
    ("max_size",): lambda settings: settings.max_size and parse_size(settings.max_size, "--max-size"),
    ("keep_alive",): lambda settings: keep_alive_s(settings.keep_alive),
    ("ocr_languages",): _check_languages,
    ("tier",): _check_tier,
    ("allow_origin",): _check_origins,
}
"""Settings -> check of them, which raises UsageError or StoreError. Modules are imported only for settings in use."""
