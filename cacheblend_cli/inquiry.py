"""A question as it goes to an engine: one of this process, or one at the other end of a socket. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_cli.settings import Resolved, Settings

if TYPE_CHECKING:
    from cacheblend_cli.corpus.scopes import Scope


@dataclass(frozen=True)
class Manner:
    """How questions are answered, beside the settings, and what is told of the answers; see `cacheblend ask --help`.

    json_schema: its text. explain, tokens: tell of layers and of the prompt's text, and of each token of the chunks."""

    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    verify: bool = False
    confirm: bool = False
    save: bool = True
    ids: bool = False
    explain: bool = False
    tokens: bool = False

    @property
    def sampled(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        return {name: getattr(self, name) for name in ("stop", "logprobs", "json_schema", "regex")}


@dataclass(frozen=True)
class Inquiry:
    """keys: of the chunks, in hex; None to search them in the scope, None being all that can be searched. history: what was
    said before, by the user and the model in turn."""

    question: str
    keys: tuple[str, ...] | None
    resolved: Resolved
    scope: Scope | None = None
    history: tuple[str, ...] = ()
    manner: Manner = Manner()

    @property
    def wire(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "question": self.question, "keys": self.keys, "history": self.history, "scope": scope_on_wire(self.scope),
            "manner": asdict(self.manner), "settings": settings_on_wire(self.resolved.settings),
            "origin": dict(self.resolved.origin),
        }  # fmt: skip

    @classmethod
    def of_wire(cls, told: dict[str, Any]) -> Inquiry:
        keys, manner = told["keys"], told["manner"]
        return cls(
            told["question"],
            None if keys is None else tuple(keys),
            Resolved(settings_of_wire(told["settings"]), told["origin"]),
            scope_of_wire(told["scope"]),
            tuple(told["history"]),
            Manner(**{**manner, "stop": tuple(manner["stop"])}),
        )


def settings_on_wire(settings: Settings) -> dict[str, Any]:
    """A directory of weights is named so that an engine, which stands elsewhere, finds it."""
    told, weights = asdict(settings), Path(settings.embeddings).expanduser()
    return told | {"embeddings": os.path.abspath(weights)} if settings.embeddings and weights.is_dir() else told


def settings_of_wire(told: dict[str, Any]) -> Settings:
    return Settings(**{f.name: told[f.name] for f in fields(Settings)} | {"template_var": tuple(told["template_var"])})


def scope_on_wire(scope: Scope | None) -> dict[str, Any] | None:
    return None if scope is None else {**asdict(scope), "linked": sorted(scope.linked)}


def scope_of_wire(told: dict[str, Any] | None) -> Scope | None:
    from cacheblend_cli.corpus.scopes import Scope

    return None if told is None else Scope(**{**told, "linked": frozenset(told["linked"])})
