"""Settings that identify an engine, and settings that a project may set only if the user trusts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheblend_cli.settings.fields import Settings, grouped

IDENTITY = (*grouped("prompt", "model"), "device", "dtype", "weight_dtype")
"""Settings of a question that only an engine with the same ones answers. Its other settings are the engine's own."""
_OF_LEFT_ENGINE = ("kv_pool_dtype", "kv_dtype", "context", *grouped("cutting"))
HARMLESS = frozenset(
    grouped(
        "search", "blend", "research", "sampling", "prompt", "cutting", "serve", "decoding", but=("embeddings", "allow_origin")
    )
)  # fmt: skip
"""Settings that change only the answers here. All others (what names a place, a model or a receiver, what uses the
machine or removes stored data) are taken from a project's file only if the user trusts it."""


def left_engine_settings(settings: Settings) -> str:
    """Return the settings that, beside IDENTITY, must be a question's for an engine that a command left running: nobody
    chose that engine's own, and the answer is the one that a command computes itself."""
    return repr([getattr(settings, name) for name in _OF_LEFT_ENGINE])


def risky_settings(values: Mapping[str, Any], folder: Path) -> list[str]:
    """Return those of the settings that a project in this folder may set only if it is trusted."""

    def is_harmless(name: str, value: Any) -> bool:
        if name == "prompt":  # a file, which has to be inside the project
            file = os.path.realpath(folder / Path(str(value)).expanduser())
            return Path(file).is_relative_to(os.path.realpath(folder))
        return name in HARMLESS or name not in vars(Settings())  # an unknown name is an error in any case

    return [name for name, value in values.items() if not is_harmless(name, value)]
