"""What a run is to read: the paths that were given, and what of their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_cli.corpus.conversions import Conversions


@dataclass(frozen=True)
class Paths:
    """named: files and folders, "-" for stdin. listed: files of a list, which are passed over where no converter knows them.
    select: the fields of a Selection that were asked for; the others are as the store remembers them of each path. collection: what they are
    called together from now on, "" for nothing new. conversions: of
    runs before, for those that follow each other in one process."""

    named: Sequence[str]
    listed: Sequence[str] = ()
    select: Mapping[str, Any] = field(default_factory=dict)
    collection: str = ""
    conversions: Conversions = field(default_factory=Conversions)

    @property
    def all(self) -> list[str]:
        return [*self.named, *self.listed]
