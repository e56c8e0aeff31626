"""Paths given to a run, and which files of folders are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_cli.corpus.conversions import Conversions


@dataclass(frozen=True)
class Paths:
    """Documents to read.

    named: files and folders, "-" for stdin. listed: files of a list; those that no converter knows are skipped. select: fields
    of a Selection that were asked for; the others are as the store remembers them for each path. collection: name to give the
    documents, "" for none. conversions: cache of converted files, for several runs in one process.
    """

    named: Sequence[str]
    listed: Sequence[str] = ()
    select: Mapping[str, Any] = field(default_factory=dict)
    collection: str = ""
    conversions: Conversions = field(default_factory=Conversions)

    @property
    def all(self) -> list[str]:
        return [*self.named, *self.listed]
