"""A question as it goes to an engine: one of this process, or one at the other end of a socket. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from cacheblend_cli.corpus.scopes import EVERYTHING, Scope
from cacheblend_cli.settings import Resolved


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
    """keys: of the chunks, in hex; None to search them in the scope. history: what was said before, by the user and the model
    in turn."""

    question: str
    keys: tuple[str, ...] | None
    resolved: Resolved
    scope: Scope = EVERYTHING
    history: tuple[str, ...] = ()
    manner: Manner = Manner()

    @property
    def wire(self) -> dict[str, Any]:
        """As JSON has it. A directory of weights is named so that an engine, which stands elsewhere, finds it."""
        told: dict[str, Any] = to_builtins(self)
        named = self.resolved.settings.embeddings
        if named and Path(named).expanduser().is_dir():
            told["resolved"]["settings"]["embeddings"] = os.path.abspath(Path(named).expanduser())
        return told

    @classmethod
    def of_wire(cls, told: dict[str, Any]) -> Inquiry:
        return convert(told, cls)
