"""Paths given to a run, and the selection of files in folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_cli.corpus.conversions import Conversions


@dataclass(frozen=True)
class Paths:
    """Documents to read."""

    named: Sequence[str]  # files and folders; "-" is stdin
    listed: Sequence[str] = ()  # files from a list; files without a converter are skipped
    # Selection fields from the command line; others are remembered
    select: Mapping[str, Any] = field(default_factory=dict)
    collection: str = ""  # name for the documents, "" for none
    conversions: Conversions = field(default_factory=Conversions)  # cache, for several runs in one process

    @property
    def all(self) -> list[str]:
        return [*self.named, *self.listed]
