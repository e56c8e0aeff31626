"""Texts of documents when they were stored, compared with their files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredText:
    """Text of a document when it was stored."""

    digest: str  # see corpus/documents.py: Document.digest
    updated: float  # seconds since the epoch
    # fields of a FileState when the file was read; empty if unknown
    file: Mapping[str, Any] = field(default_factory=dict)

    def is_outdated(self, path: str) -> bool:
        """Return whether the file differs now, by size and modification time. Short plain text is compared, too."""
        try:
            now = os.stat(path)
        except OSError:
            return False
        if self.file:
            is_same = (now.st_size, now.st_mtime_ns) == (self.file.get("size"), self.file.get("mtime_ns"))
        else:
            is_same = now.st_mtime_ns <= self.updated * 1e9
        if is_same:
            return False
        from cacheblend_cli.corpus.documents import plain_digest  # converters, which an answer seldom needs

        return plain_digest(path) != self.digest
