"""Settings as flags of commands, and where to set the others."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields

from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import GROUPS, Settings, grouped
from cacheblend_cli.settings.fields import REMOVED
from cacheblend_cli.settings.identity import IDENTITY

_COMMON = (
    "top_k", "search", "on_weak_match", "on_unsupported", "mode", "ratio", "max_tokens", "reasoning_tokens", "temperature", "top_p",
    *IDENTITY, "salt", "store",
)  # fmt: skip
ASK = ("top_k", "collection", "expand", *_COMMON, "selector", "seed")
"""Flags of `ask` and `chat`: what changes from one question to the next."""
_ENGINE = (*grouped("machine", "decoding", "memory", but=IDENTITY), *GROUPS["tier"], "embeddings", "lock_timeout")
SERVE = ("chunk_tokens", *_COMMON, *_ENGINE, *GROUPS["serve"])
_HOMES = (
    (_ENGINE, "a setting of the engine", "serve"),
    (GROUPS["research"], "an option for research", "eval"),
    (("context", "max_size", *GROUPS["cutting"]), "a setting of the stored KV", "precompute"),
    (ASK, "a setting", "ask"),
    (tuple(vars(Settings())), "a setting", ""),
)
"""(settings, what they are, command with their flags); the first match counts."""
_REMOVED = {
    "--ray": "use --collector ray:ADDRESS (docs/extending.md)",
    "--decode-url": "use --decoder vllm:URL (docs/extending.md)",
    "--decode-key": "use the variable VLLM_API_KEY (docs/extending.md)",
    "--hand-over": "use --decoder vllm:URL,DIRECTORY (docs/extending.md)",
    "--recheck": "chunks verify checks every stored byte; cacheblend precompute --force computes KV again",
    **{f"--{name.replace('_', '-')}": instead for name, instead in REMOVED.items()},
}
_NAMES = {
    flag: field.name
    for field in fields(Settings)
    for flag in (field.metadata.get("flag") or f"--{field.name.replace('_', '-')}").replace("/", " ").split()
}


def removed(flag: str) -> UsageError | None:
    """Return an error that says what to use instead of a flag of earlier versions; None for other flags."""
    return UsageError(f"{flag} was removed", _REMOVED[flag]) if flag in _REMOVED else None


def elsewhere(flag: str, args: Sequence[str]) -> UsageError | None:
    """Return an error that says where to set a setting that is not a flag of this command; None for other flags.

    args: of the command line, with the flag and its value.
    """
    if (name := _NAMES.get(flag)) is None:
        return None
    what, command = next((what, command) for names, what, command in _HOMES if name in names)
    value = _value(name, flag, args)
    setting = f"cacheblend config set {name} {value}"
    switch = value in ("true", "false")
    other = f", or cacheblend {command} {flag}{'' if switch else f' {value}'}" if command else ""
    return UsageError(f"{flag} is {what}", f"{setting}{other}")


def _value(name: str, flag: str, args: Sequence[str]) -> str:
    """Return the flag's value as a word of a shell command, VALUE if it has none or may be a secret."""
    if isinstance(getattr(Settings(), name), bool):
        return "false" if flag.startswith("--no-") else "true"
    for word, following in zip(args, [*args[1:], ""], strict=True):
        given = following if word == flag else word.removeprefix(f"{flag}=") if word.startswith(f"{flag}=") else ""
        if given and not given.startswith("-") and name != "tier":
            return shlex.quote(given)
    return "VALUE"
