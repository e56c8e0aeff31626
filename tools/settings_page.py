"""The page of all settings, from settings/fields.py."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from typing import Any

from cacheblend_cli.settings import GROUPS, Settings
from cacheblend_cli.settings.identity import HARMLESS

_HEAD = """# Settings

All settings, written by `python -m tools.reference`. Each is a key of `cacheblend.toml` and `config.toml`
(`cacheblend config set KEY VALUE`), an environment variable, and a flag of the commands named. A flag overrides the
variable, which overrides the project's `cacheblend.toml`, then your own `config.toml`
([where it is](your-data.md)), then the default. `cacheblend config show --all` shows the values and where each comes from.
A bad value is refused by `config set`, and by every command that reads it, with the file or variable that sets it.

`*`: in a project's `cacheblend.toml` it is ignored until you run `cacheblend trust`
([security](security.md#projects-from-elsewhere)). API keys of `serve` are not settings: `CACHEBLEND_API_KEY`.
"""
_TITLES = {
    "search": "Search", "blend": "Reuse of stored KV", "research": "Research", "check": "models check", "sampling": "The answer", "prompt": "The prompt",
    "model": "The model", "machine": "This machine", "decoding": "Decoding", "memory": "Memory", "tenant": "Tenants", "reading": "Reading documents",
    "cutting": "Cutting documents", "store": "The store", "tier": "A shared tier", "start": "Start", "serve": "The server",
}  # fmt: skip
_UNDOCUMENTED = {
    "force_store": "Accept a store on a network filesystem, or one that others could change.",
}
"""Meaning of settings without a flag."""


def page(flags: Mapping[str, Set[str]]) -> str:
    """Return docs/settings.md. flags: command -> names of its parameters."""
    text, of = _HEAD, {field.name: field for field in fields(Settings)}
    for group, names in GROUPS.items():
        rows = [_row(of[name], [command for command, given in flags.items() if name in given]) for name in names]
        head = ("| key | default | variable | flag of | meaning |", "|---|---|---|---|---|")
        text += "\n".join(("", f"## {_TITLES[group]}", "", *head, *rows, ""))
    return text


def _row(field: Any, commands: list[str]) -> str:
    name, metadata = field.name, field.metadata
    star = "" if name in HARMLESS else " `*`"
    meaning = metadata.get("help") or _UNDOCUMENTED[name]
    where = ", ".join(f"`{command}`" for command in commands) or "none"
    cells = (f"`{name}`{star}", _default(field), f"`CACHEBLEND_{name.upper()}`", where, meaning.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def _default(field: Any) -> str:
    shown = field.metadata.get("shown")
    if isinstance(shown, str):
        return shown
    value = field.default
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in ("", (), None) else f"{value:g}" if isinstance(value, float) else str(value)
