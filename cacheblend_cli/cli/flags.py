"""Settings as flags of commands, and what to use instead of flags that a command does not have."""

from __future__ import annotations

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
    ("serve", _ENGINE),
    ("eval", GROUPS["research"]),
    ("precompute", ("context", "max_size", *GROUPS["cutting"])),
    ("ask", ASK),
    ("", tuple(vars(Settings()))),
)
"""(command, settings that are its flags); the first one with a setting counts."""
_REMOVED = {
    "--ray": "use --collector ray:ADDRESS (docs/extending.md)",
    "--decode-url": "use --decoder vllm:URL (docs/extending.md)",
    "--decode-key": "use the variable VLLM_API_KEY (docs/extending.md)",
    "--hand-over": "use --decoder vllm:URL,DIRECTORY (docs/extending.md)",
    "--recheck": "chunks verify checks every stored byte; cacheblend precompute --force computes KV again",
    **{f"--{name.replace('_', '-')}": instead for name, instead in REMOVED.items()},
}


def instead_of(flag: str) -> UsageError | None:
    """Return an error that says what to use instead of a flag of earlier versions, or where to set a setting that is
    not a flag of this command; None for other flags."""
    if flag in _REMOVED:
        return UsageError(f"{flag} was removed", _REMOVED[flag])
    name = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    command = next((command for command, names in _HOMES if name in names), None)
    if command is None:
        return None
    value, argument = "VALUE", " VALUE"
    if isinstance(getattr(Settings(), name), bool):
        value, argument = "false" if flag.startswith("--no-") else "true", ""
    other = f", or cacheblend {command} {flag}{argument}" if command else ""
    return UsageError(
        f"{flag} is a setting, not a flag of this command", f"cacheblend config set {name} {value}{other}"
    )
