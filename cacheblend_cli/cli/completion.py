"""Shell completion of chunk ids, documents and models. Imports neither torch nor transformers; silent on errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from itertools import islice
from pathlib import Path

import typer

from cacheblend_cli.settings import Settings, resolve

_MOST = 200
SETTINGS = {field.name: field for field in fields(Settings)}


def _quietly(complete: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Return no completions on an error."""

    @wraps(complete)
    def run(incomplete: str) -> list[str]:
        try:
            return complete(incomplete)[:_MOST]
        except Exception:
            return []

    return run


@_quietly
def chunk_ids(incomplete: str) -> list[str]:
    """Complete the last of comma-separated chunk ids."""
    from cacheblend_cli.cli.stores import open_store

    before, comma, last = incomplete.rpartition(",")
    with open_store(resolve({}).settings, write=False) as store:
        ids = islice((m.id for m in store.chunks() if m.id.startswith(last)), _MOST)
        return [before + comma + name[: max(12, len(last))] for name in ids]


@_quietly
def sources(incomplete: str) -> list[str]:
    """Complete stored documents, relative to the working directory."""
    from cacheblend_cli.cli.stores import open_store
    from cacheblend_cli.corpus.places import shown

    with open_store(resolve({}).settings, write=False) as store:
        names = {shown(d.source) for d in store.documents()}
    return sorted(name for name in names if name.startswith(incomplete))


def settings(incomplete: str) -> list[str]:
    return [name for name in SETTINGS if name.startswith(incomplete)]


def values_of(name: str) -> Callable[[str], list[str]] | None:
    """Return the completion of a setting's values, None if they have no names."""
    if name == "model":
        return models
    choices = SETTINGS[name].metadata.get("choices", ())
    return (lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]) if choices else None


def values(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the value of `config set KEY VALUE`."""
    complete = values_of(str(ctx.params.get("key", "")).replace("-", "_"))
    return [] if complete is None else complete(incomplete)


@_quietly
def models(incomplete: str) -> list[str]:
    from cacheblend_cli.model.on_disk import models_on_disk

    return [name for name, _ in models_on_disk(Path()) if name.startswith(incomplete)]
